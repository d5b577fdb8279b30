"""File name of a report, and the command that writes it."""

from __future__ import annotations

import shlex
from pathlib import Path

from ..sinks.remote_folder import is_address

FILE = "report.html"  # relative to the folder of a run or a sweep


def command_for(folder: Path) -> str:
    """Return the command that writes the report of a run or a sweep.

    The report of a remote run is written to the current directory.
    """
    out = f" --out {FILE}" if is_address(folder) else ""
    return f"python -m instrument.report {shlex.quote(str(folder))}{out}"
