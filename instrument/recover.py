"""`python -m instrument.recover RUN ...`: the journals of runs that were killed, turned into Parquet.

It is not needed to read such a run: `instrument.load` reads journals too. It is for readers that know Parquet only.

Exit code 0: all is Parquet now; 1: a run is still running, cannot be written, or has a journal that is damaged; 2: there
is no run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .analysis.load import NoRunError, load
from .errors import ConfigError
from .run.folder import mark_killed
from .sinks.lock import is_written
from .sinks.recovery import recover
from .sinks.remote import refuse_address


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; gives the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m instrument.recover", description="Turn the journals of runs that were killed into Parquet."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="a run's folder, or one above several")
    code = 0
    for path in parser.parse_args(arguments).runs:
        try:
            refuse_address(path, "RUN", "journals are where the run was made", allowed="a folder of this machine")
            folders = load(path).folders
        except (NoRunError, ConfigError) as error:
            print(error, file=sys.stderr)
            code = 2
            continue
        for folder in folders:
            code = max(code, _recover(folder))
    return code


def _recover(folder: Path) -> int:
    if is_written(folder):
        print(f"{folder}: still running; left as it is", file=sys.stderr)
        return 1
    try:
        found = recover(folder)
        mark_killed(folder)
    except OSError as error:
        print(f"{folder}: {error}", file=sys.stderr)
        return 1
    rows = ", ".join(f"{count:,} of {table}" for table, count in found.rows.items())
    torn = f"; the step that was being written is not among them ({', '.join(found.torn)})" if found.torn else ""
    print(f"{folder}: {f'rows turned into Parquet: {rows}' if rows else 'all is Parquet already'}{torn}")
    for problem in found.problems:
        print(f"{folder}: {problem}", file=sys.stderr)
    return 1 if found.problems else 0


if __name__ == "__main__":
    sys.exit(main())
