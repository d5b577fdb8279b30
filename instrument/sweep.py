"""`python -m instrument.sweep FOLDER [--rerun]`: the jobs of a sweep, and what became of each; those not done, done again.

Exit code 0: all are done; 1: some are not; 2: a mistake in what was asked.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .errors import InstrumentError
from .run.launch import complain, refused
from .run.sweep_jobs import DONE, Sweep, summary

WIDTH_IN_A_PIPE = 160
COLOURS = {"done": "green", "failed": "red", "killed": "red", "interrupted": "yellow", "missing": "yellow"}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; gives the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m instrument.sweep", description="The jobs of a sweep, and what became of each."
    )
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="the folder of a sweep")
    parser.add_argument("--rerun", action="store_true", help="do the jobs that are not done, in the same folder")
    asked = parser.parse_args(arguments)
    try:
        if asked.rerun:
            _rerun(asked.folder)
        return _show(asked.folder)
    except InstrumentError as error:
        return complain(error)


def _rerun(folder: Path) -> None:
    from .run.sweep_rerun import rerun

    try:
        count = rerun(Sweep(Path(os.path.abspath(folder))))
    except InstrumentError:
        raise
    except Exception as error:
        raise refused(error, []) from error
    print(f"\n{count} jobs done again" if count else "nothing to do again")


def _show(folder: Path) -> int:
    sweep = Sweep(folder)
    jobs = sweep.jobs()
    table = Table(box=None, pad_edge=False)
    for name in ("job", "status", "overrides", "error"):
        table.add_column(name, overflow="fold")
    for job in jobs:
        status = Text(job.status, style=COLOURS.get(job.status, ""))
        table.add_row(job.name, status, Text(sweep.label(job)), Text(job.error or ""))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH_IN_A_PIPE
    console.print(table)
    print(f"\n{len(jobs)} jobs in {folder}: {summary(jobs)}")
    return 0 if all(job.status == DONE for job in jobs) else 1


if __name__ == "__main__":
    sys.exit(main())
