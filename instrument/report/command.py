"""Where a report is written, and what to type to make one."""

from __future__ import annotations

import shlex
from pathlib import Path

from ..sinks.remote import is_address

FILE = "report.html"  # in the folder of a run or a sweep


def command_for(folder: Path) -> str:
    """What to type to make the report of a run or a sweep; that of a remote one is written here."""
    out = f" --out {FILE}" if is_address(folder) else ""
    return f"python -m instrument.report {shlex.quote(str(folder))}{out}"
