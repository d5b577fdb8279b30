"""`python -m instrument.recover RUN ...`: the journals of runs that were killed, turned into Parquet.

It is not needed to read such a run: `instrument.load` reads journals too. It is for readers that know Parquet only.

Exit code 0: all is Parquet now; 1: a run is still running, cannot be written, or has a journal that is damaged; 2: there
is no run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from .run.folder import mark_killed
from .run.upkeep import each_run
from .sinks.recovery import recover


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; gives the exit code."""
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
