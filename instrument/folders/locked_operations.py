"""Operations on the locked folders of finished runs, for `python -m instrument.compact` and `python -m instrument.recover`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from ..analysis.folders import find_runs
from ..errors import InstrumentError
from ..sinks.lock import FolderLock
from ..sinks.remote_folder import check_is_local
from ..verbs import program

Operation = Callable[[Path], tuple[str, Sequence[str]]]
"""An operation on the folder of a run, called while the folder is locked. Returns a summary and a list of problems."""


def locked(folder: Path) -> AbstractContextManager[None]:
    """Hold the lock on the folder of a run inside the block, so that no other process writes to it.

    Raises:
        InstrumentError: A process of the run still writes to the folder.
        OSError: The folder is not writable.
    """
    return FolderLock(folder).held(InstrumentError("the run is in progress; nothing was changed"))


def for_each_run(
    arguments: Sequence[str] | None, operation: Operation, *, name: str, description: str, metavar: str, reason: str
) -> int:
    """Apply an operation to each run that the command line names. Return the exit code.

    It is 0 for success, 1 if an operation failed or reported a problem, and 2 if a folder is invalid.
    """
    parser = argparse.ArgumentParser(prog=program(name), description=description)
    parser.add_argument(
        "runs",
        nargs="+",
        metavar=metavar,
        type=Path,
        help="the folder of a run, or a folder that contains several runs",
    )
    code = 0
    for path in parser.parse_args(arguments).runs:
        try:
            check_is_local(path, metavar, reason, fix="pass a local folder")
            _, folders = find_runs(path)
        except InstrumentError as error:
            print(error, file=sys.stderr)
            code = error.exit_code
            continue
        for folder in folders:
            code = max(code, _apply(folder, operation))
    return code


def _apply(folder: Path, operation: Operation) -> int:
    """Apply the operation to one run, print the result, and return the exit code."""
    try:
        with locked(folder):
            summary, problems = operation(folder)
    except (OSError, InstrumentError) as error:
        print(f"{folder}: {error}", file=sys.stderr)
        return 1
    print(f"{folder}: {summary}")
    for problem in problems:
        print(f"{folder}: {problem}", file=sys.stderr)
    return 1 if problems else 0
