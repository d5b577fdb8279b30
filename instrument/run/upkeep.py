"""What is done to runs that are over, by `python -m instrument.compact` and `python -m instrument.recover`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ..analysis.folders import NoRunError, find_runs
from ..errors import ConfigError, InstrumentError
from ..sinks.lock import FolderLock, is_written
from ..sinks.remote import refuse_address

Work = Callable[[Path], tuple[str, Sequence[str]]]
"""Given the folder of a run, which nobody else writes to meanwhile: what was done, and what could not be, in words."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Nobody else writes to a run's folder meanwhile.

    Raises:
        InstrumentError: Somebody does.
        OSError: It cannot be written.
    """
    lock = FolderLock(folder)
    if is_written(folder) or not lock.acquire():
        raise InstrumentError("still running; left as it is")
    try:
        yield
    finally:
        lock.release()


def each_run(
    arguments: Sequence[str] | None, work: Work, *, name: str, description: str, metavar: str, reason: str
) -> int:
    """The command line of a module; gives the exit code.

    Args:
        arguments: Those behind its name; None: those of this process.
        work: Done to each run.
        name: The module's.
        description: What it does, for `--help`.
        metavar: What folders are called there.
        reason: Why it needs a folder of this machine.
    """
    parser = argparse.ArgumentParser(prog=f"python -m instrument.{name}", description=description)
    parser.add_argument("runs", nargs="+", metavar=metavar, type=Path, help="a run's folder, or one above several")
    code = 0
    for path in parser.parse_args(arguments).runs:
        try:
            refuse_address(path, metavar, reason, allowed="a folder of this machine")
            _, folders = find_runs(path)
        except (NoRunError, ConfigError) as error:
            print(error, file=sys.stderr)
            code = 2
            continue
        for folder in folders:
            code = max(code, _done(folder, work))
    return code


def _done(folder: Path, work: Work) -> int:
    try:
        with held(folder):
            told, problems = work(folder)
    except (OSError, InstrumentError) as error:
        print(f"{folder}: {error}", file=sys.stderr)
        return 1
    print(f"{folder}: {told}")
    for problem in problems:
        print(f"{folder}: {problem}", file=sys.stderr)
    return 1 if problems else 0
