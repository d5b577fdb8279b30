"""`python -m instrument.compact FOLDER ...`: the small Parquet files of runs merged into large ones.

A run may be read meanwhile. Journals that a killed run left become Parquet first.

Exit code 0: all is merged; 1: a run is still written to, cannot be written, or has files that cannot be read; 2: there is no
run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .analysis.load import NoRunError, load
from .errors import ConfigError
from .run.checkpoint import Checkpoints
from .sinks.compaction import compact
from .sinks.lock import FolderLock, is_written
from .sinks.remote import refuse_address


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; gives the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m instrument.compact", description="Merge the small Parquet files of runs into large ones."
    )
    parser.add_argument("runs", nargs="+", metavar="FOLDER", type=Path, help="a run's folder, or one above several")
    code = 0
    for path in parser.parse_args(arguments).runs:
        try:
            refuse_address(
                path, "FOLDER", "files are merged where they can be renamed", allowed="a folder of this machine"
            )
            folders = load(path).folders
        except (NoRunError, ConfigError) as error:
            print(error, file=sys.stderr)
            code = 2
            continue
        for folder in folders:
            code = max(code, _compact(folder))
    return code


def _compact(folder: Path) -> int:
    lock = FolderLock(folder)
    if is_written(folder) or not lock.acquire():
        print(f"{folder}: still running; left as it is", file=sys.stderr)
        return 1
    try:
        found = compact(folder, _ends(folder))
    except OSError as error:
        print(f"{folder}: {error}", file=sys.stderr)
        return 1
    finally:
        lock.release()
    merged = {name: count for name, count in found.before.items() if count != found.after[name]}
    told = ", ".join(f"{count:,} of {name} are {found.after[name]:,} now" for name, count in merged.items())
    print(f"{folder}: {told or 'nothing to merge'}")
    for problem in found.problems:
        print(f"{folder}: {problem}", file=sys.stderr)
    return 1 if found.problems else 0


def _ends(folder: Path) -> list[dict[str, int]]:
    """How many parts of each table each process had written at the checkpoint that the run would go on from."""
    with suppress(ConfigError):  # there is none
        parts: list[dict[str, int]] = Checkpoints(folder).load()["parts"]
        return parts
    return []


if __name__ == "__main__":
    sys.exit(main())
