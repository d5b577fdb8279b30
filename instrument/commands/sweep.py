"""`python -m instrument.sweep FOLDER [--rerun]`: list the jobs of a sweep with their status, and rerun unfinished jobs.

Exit codes: 0, all jobs are done; 1, some jobs are not done; 2, the arguments are invalid; 130, interrupted by Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

from hydra.core.utils import setup_globals
from hydra.types import RunMode
from rich.table import Table
from rich.text import Text

from instrument.commands.job import as_instrument_error, numbered_job
from instrument.commands.verbs import add_json, parser_of, print_json, wide_console, with_arguments
from instrument.config.hydra_internals import BASIC_SWEEPER, config_loader, launcher_of
from instrument.errors import ConfigError, InstrumentError, Problem
from instrument.formatting import counted
from instrument.storage.lock import FolderLock
from instrument.storage.remote_folder import check_is_local, is_address
from instrument.training.sweep_jobs import (
    DONE,
    RUNNING,
    STOPPED,
    Runs,
    Sweep,
    count_by_status,
    folder_override,
    grouped_lines,
    jobs_in,
    outcome_lines,
    overrides_of,
    print_summary,
)

WHERE = "--rerun"
COLOURS = {"done": "green", "failed": "red", "killed": "red"}  # the others are yellow


def command_line() -> argparse.ArgumentParser:
    parser = parser_of("sweep")
    parser.add_argument("folder", metavar="FOLDER", help="the folder or the remote address of a sweep")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--rerun", action="store_true", help="run the unfinished jobs again, in the same folder")
    add_json(how)
    return parser


@with_arguments(command_line)
def main(args: argparse.Namespace) -> int:
    if args.rerun:
        _rerun(args.folder)
    return _show(args.folder, as_json=args.json)


def _rerun(written: str) -> None:
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
    print(f"\n{counted(count, 'job')} rerun" if count else "no jobs to rerun")


def _show(folder: str, *, as_json: bool) -> int:
    sweep = jobs_in(folder)
    jobs = sweep.jobs()
    left = [job for job in jobs if job.status != DONE]
    if as_json:
        print_json(jobs)
        return 1 if left or not jobs else 0
    table = Table(box=None, pad_edge=False)
    for name in ("job", "status", "overrides", "warnings", "error"):
        table.add_column(name, overflow="fold")
    for job in jobs:
        status = Text(job.status, style=COLOURS.get(job.status, "" if job.status == RUNNING else "yellow"))
        warnings = "" if job.warnings is None else str(job.warnings)
        table.add_row(job.name, status, Text(sweep.label(job)), warnings, Text(job.error or ""))
    wide_console().print(table)
    more = outcome_lines(sweep, jobs) if isinstance(sweep, Sweep) and not is_address(folder) else []
    print(
        "", *grouped_lines(left), f"{counted(len(jobs), 'job')} in {folder}: {count_by_status(jobs)}", *more, sep="\n"
    )
    if isinstance(sweep, Runs):
        print("this folder has no record of a sweep: missing jobs are not listed")
    return 1 if left or not jobs else 0


def rerun(sweep: Sweep) -> int:
    """Run all jobs of a sweep that are neither done, stopped by a rule, nor running. Return their number.

    A job with a checkpoint is resumed. Any other job starts again, and its old files are moved to `.aside`.
    """
    _check_rerunnable(sweep)
    in_progress = Problem(WHERE, "the sweep is in progress in another process", given=str(sweep.folder))
    with FolderLock(sweep.folder).held(ConfigError(in_progress)), _working_directory(Path(sweep.hydra.runtime.cwd)):
        unfinished = [sweep_job for sweep_job in sweep.jobs() if sweep_job.status not in (DONE, STOPPED, RUNNING)]
        setup_globals()
        loader = config_loader()
        given = [*overrides_of(sweep.hydra, "hydra"), folder_override("hydra.sweep.dir", sweep.folder)]
        overrides = [*given, *overrides_of(sweep.hydra, "task")]
        config = loader.load_configuration("config", overrides=overrides, run_mode=RunMode.MULTIRUN)
        launcher = launcher_of(config, loader, numbered_job)
        prepared = [[*each.overrides, f"hydra.sweep.subdir={each.name}"] for each in unfinished]
        at_once = sweep.hydra.sweeper.max_batch_size or len(prepared) or 1
        for first in range(0, len(prepared), at_once):
            launcher.launch(prepared[first : first + at_once], initial_job_idx=first)
        return len(unfinished)


def _check_rerunnable(sweep: Sweep) -> None:
    if sweep.has_known_jobs:
        return
    sweeper = str(sweep.hydra.sweeper["_target_"])
    if sweeper != BASIC_SWEEPER:
        message = "this sweeper chooses each job from the results of earlier jobs, so the missing jobs are not known"
        study = "hydra.sweeper.storage=sqlite:///study.db and hydra.sweeper.study_name=NAME"
        fix = f"run the command of the sweep again; with {study} it continues the existing study"
        raise ConfigError(Problem(WHERE, message, given=sweeper.rpartition(".")[2], fix=fix))
    message = "the folders of the jobs are not named by job number (hydra.sweep.subdir), or their values are shuffled"
    raise ConfigError(Problem(WHERE, message))


@contextmanager
def _working_directory(folder: Path) -> Iterator[None]:
    if not os.access(folder, os.X_OK):
        raise ConfigError(Problem(WHERE, "cannot enter the folder in which the sweep was started", given=str(folder)))
    sys.path.insert(0, str(folder))
    try:
        with chdir(folder):
            yield
    finally:
        sys.path.remove(str(folder))


if __name__ == "__main__":
    sys.exit(main())
