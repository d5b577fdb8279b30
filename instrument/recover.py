"""`python -m instrument.recover RUN ...`: convert the journals of killed runs to Parquet.

`instrument.load` also reads journals, so this is only needed for programs that read Parquet only.

Exit codes: 0, everything is Parquet; 1, a run is in progress, not writable, or has a damaged journal; 2, there is no
run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .folders.maintenance import each_run
from .folders.run_folder import mark_killed
from .sinks.recovery import recover


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    return each_run(
        arguments,
        _recover,
        name="recover",
        description="Turn the journals of runs that were killed into Parquet.",
        metavar="RUN",
        reason="journals are where the run was made",
    )


def _recover(folder: Path) -> tuple[str, Sequence[str]]:
    found = recover(folder)
    mark_killed(folder)
    rows = ", ".join(f"{count:,} of {table}" for table, count in found.rows.items())
    torn = f"; the step that was being written is not among them ({', '.join(found.torn)})" if found.torn else ""
    return f"{f'rows turned into Parquet: {rows}' if rows else 'all is Parquet already'}{torn}", found.problems


if __name__ == "__main__":
    sys.exit(main())
