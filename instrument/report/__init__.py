"""Reports: one HTML file that shows a run or a whole sweep. Command line: `python -m instrument.report RUN`.

instrument.report.make(run).save("report.html")
"""

from __future__ import annotations

import shlex
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..storage.remote_folder import is_address
from ..storage.run_search import REPORT_FILE as FILE

if TYPE_CHECKING:
    from .make_report import Report, check_packages, make

__all__ = ["FILE", "Report", "check_packages", "command_for", "make"]


def command_for(folder: Path) -> str:
    """Return the command that writes the report of a run or a sweep.

    The report of a remote run is written to the current directory.
    """
    out = f" --out {FILE}" if is_address(folder) else ""
    return f"python -m instrument.report {shlex.quote(str(folder))}{out}"


def __getattr__(name: str) -> Any:
    # Imported on first access: most runs only print the command that makes a report.
    if name in __all__:
        return getattr(import_module(".make_report", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
