"""Operations on the locked folders of finished runs: `compact`, `recover`, `upload`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from ..errors import InstrumentError
from ..storage.lock import FolderLock
from ..storage.remote_folder import check_is_local
from ..storage.run_search import find_runs
from .verbs import parser_of

Operation = Callable[[Path], tuple[str, Sequence[str]]]
"""An operation on the folder of a run, called while the folder is locked. Returns a summary and a list of problems."""


def parser_of_runs(verb: str) -> argparse.ArgumentParser:
    parser = parser_of(verb)
    text = "the folder of a run, or a folder that contains several runs"
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help=text)
    return parser


def for_each_run(paths: Sequence[Path], operation: Operation, *, reason: str) -> int:
    """Apply an operation to each run in some folders. Return the exit code: 1 if one failed or has a problem, 2 for an invalid folder."""
    code = 0
    for path in paths:
        try:
            check_is_local(path, "RUN", reason, fix="pass a local folder")
            _, folders = find_runs(path)
        except InstrumentError as error:
            print(error, file=sys.stderr)
            code = error.exit_code
            continue
        for folder in folders:
            code = max(code, apply_locked(folder, operation))
    return code


def apply_locked(folder: Path, operation: Operation) -> int:
    """Apply the operation to a run that no process writes to, print the result, and return the exit code."""
    try:
        with FolderLock(folder).held(InstrumentError("the run is in progress; nothing was changed")):
            summary, problems = operation(folder)
    except (InstrumentError, OSError) as error:
        print(f"{folder}: {error}", file=sys.stderr)
        return error.exit_code if isinstance(error, InstrumentError) else 1
    print(f"{folder}: {summary}")
    for problem in problems:
        print(f"{folder}: {problem}", file=sys.stderr)
    return 1 if problems else 0
