"""Reports: one HTML file that shows a run or a whole sweep. Command line: `python -m instrument.report RUN`.

instrument.report.make(run).save("report.html")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..storage.run_search import REPORT_FILE as FILE

if TYPE_CHECKING:
    from .make_report import Report, check_packages, make

__all__ = ["FILE", "Report", "check_packages", "make"]


def __getattr__(name: str) -> Any:
    # Imported on first access: most runs only print the command that makes a report.
    if name in __all__:
        return getattr(import_module(".make_report", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
