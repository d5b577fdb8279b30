"""`python -m instrument.sweep FOLDER [--rerun]`: list the jobs of a sweep with their status, and rerun unfinished jobs.

Exit codes: 0, all jobs are done; 1, some jobs are not done; 2, the arguments are invalid; 130, interrupted by Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from rich.table import Table
from rich.text import Text

from instrument.commands.job import as_instrument_error
from instrument.commands.verbs import add_json, parser_of, print_json, wide_console, with_arguments
from instrument.errors import InstrumentError
from instrument.storage.remote_folder import check_is_local, is_address
from instrument.training.sweep_jobs import (
    DONE,
    Runs,
    Sweep,
    count_by_status,
    grouped_lines,
    jobs_in,
    outcome_lines,
    print_summary,
)

COLOURS = {
    "done": "green",
    **dict.fromkeys(("failed", "killed"), "red"),
    **dict.fromkeys(("interrupted", "stopped", "missing"), "yellow"),
}


def command_line() -> argparse.ArgumentParser:
    parser = parser_of("sweep")
    parser.add_argument("folder", metavar="FOLDER", help="the folder or the remote address of a sweep")
    parser.add_argument("--rerun", action="store_true", help="run the unfinished jobs again, in the same folder")
    add_json(parser)
    return parser


@with_arguments(command_line)
def main(args: argparse.Namespace) -> int:
    if args.rerun and args.json:
        command_line().error(
            "--json lists the jobs, and cannot be combined with --rerun, which prints the output of the jobs"
        )
    if args.rerun:
        _rerun(args.folder)
    return _show(args.folder, as_json=args.json)


def _rerun(written: str) -> None:
    from instrument.commands.rerun_sweep import WHERE, rerun

    check_is_local(written, WHERE, "jobs can only be rerun in a local folder", fix="pass a local folder")
    folder = Path(written)
    sweep = Sweep(Path(os.path.abspath(folder)))
    try:
        count = rerun(sweep)
    except InstrumentError:
        raise
    except (KeyboardInterrupt, SystemExit) as stop:
        print_summary(folder)
        raise SystemExit(stop.code if isinstance(stop, SystemExit) else 130) from None
    except Exception as error:
        raise as_instrument_error(error, []) from error
    print(f"\n{count} jobs rerun" if count else "no jobs to rerun")


def _show(folder: str, *, as_json: bool) -> int:
    sweep = jobs_in(folder)
    jobs = sweep.jobs()
    left = [job for job in jobs if job.status != DONE]
    if as_json:
        print_json(jobs)
        return 1 if left or not jobs else 0
    table = Table(box=None, pad_edge=False)
    for name in ("job", "status", "overrides", "error"):
        table.add_column(name, overflow="fold")
    for job in jobs:
        status = Text(job.status, style=COLOURS.get(job.status, ""))
        table.add_row(job.name, status, Text(sweep.label(job)), Text(job.error or ""))
    wide_console().print(table)
    more = outcome_lines(sweep, jobs) if isinstance(sweep, Sweep) and not is_address(folder) else []
    print("", *grouped_lines(left), f"{len(jobs)} jobs in {folder}: {count_by_status(jobs)}", *more, sep="\n")
    if isinstance(sweep, Runs):
        print("this folder has no record of a sweep: missing jobs are not listed")
    return 1 if left or not jobs else 0


if __name__ == "__main__":
    sys.exit(main())
