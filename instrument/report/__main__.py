"""`python -m instrument.report RUN [--out FILE] [--open]`: write the report of a run, or of a folder with several runs.

Exit codes: 0, the report was written; 1, it cannot be written, or a package is missing; 2, there is no run, or the
arguments are invalid.
"""

from __future__ import annotations

import argparse
import sys
import warnings
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from ..analysis.folders import NoRunError
from ..analysis.load import load
from ..errors import ConfigError, InstrumentError, InstrumentWarning
from ..sinks.remote import refuse_address
from . import FILE, make


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m instrument.report",
        description="One HTML file that shows a run, or a whole sweep; it works offline.",
    )
    parser.add_argument(
        "run", metavar="RUN", help="a run's folder, or one above several, such as a sweep's; or its address"
    )
    parser.add_argument("--out", metavar="FILE", type=Path, help=f"the file to write; RUN/{FILE} without it")
    parser.add_argument("--open", action="store_true", help="open it in the browser")
    asked = parser.parse_args(arguments)
    try:
        return _write(asked.run, asked.out, show=asked.open)
    except (NoRunError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 2
    except InstrumentError as error:
        print(error, file=sys.stderr)
    except OSError as error:
        print(f"{error.filename or asked.out}: {error.strerror}", file=sys.stderr)
    return 1


def _write(folder: str, out: Path | None, *, show: bool) -> int:
    if out is None:
        refuse_address(folder, "--out", "a report is written to a file of this machine", allowed="--out FILE")
        out = Path(folder) / FILE
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InstrumentWarning)  # the page and the lines below report damaged files
        run = load(folder)
        out.parent.mkdir(parents=True, exist_ok=True)
        path = make(run).save(out)
    for problem in run.problems:
        print(f"warning {problem}", file=sys.stderr)
    print(f"{path}  ({path.stat().st_size / 1e6:.1f} MB)")
    if show:
        webbrowser.open(path.resolve().as_uri())
    return 0


if __name__ == "__main__":
    sys.exit(main())
