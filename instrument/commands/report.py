"""`python -m instrument.report RUN [--out FILE] [--open]`: write the report of a run, or of a folder with several runs.

Exit codes: 0, the report was written; 1, it cannot be written, or a package is missing; 2, there is no run, or the
arguments are invalid.
"""

from __future__ import annotations

import argparse
import sys
import warnings
import webbrowser
from pathlib import Path

from instrument.analysis.load import load
from instrument.commands.verbs import parser_of, with_arguments
from instrument.errors import InstrumentWarning
from instrument.report import FILE, make
from instrument.storage.remote_folder import check_is_local


def command_line() -> argparse.ArgumentParser:
    parser = parser_of("report")
    text = "the folder of a run, a folder that contains several runs, or a remote address"
    parser.add_argument("run", metavar="RUN", help=text)
    parser.add_argument("--out", metavar="FILE", type=Path, help=f"the output file (default: RUN/{FILE})")
    parser.add_argument("--open", action="store_true", help="open the report in the browser")
    return parser


@with_arguments(command_line)
def main(args: argparse.Namespace) -> int:
    if args.out is None:
        problem = "is required: reports are written to a local file, not to a remote address"
        check_is_local(args.run, "--out", problem, fix="pass --out FILE")
    out = args.out or Path(args.run) / FILE
    try:
        # The page and the lines below report damaged files.
        with warnings.catch_warnings(action="ignore", category=InstrumentWarning):
            run = load(args.run)
            out.parent.mkdir(parents=True, exist_ok=True)
            path = make(run).save(out)
    except OSError as error:
        print(f"{error.filename or out}: {error.strerror}", file=sys.stderr)
        return 1
    for problem in run.problems:
        print(f"warning {problem}", file=sys.stderr)
    print(f"{path}  ({path.stat().st_size / 1e6:.1f} MB)")
    if args.open:
        webbrowser.open(path.resolve().as_uri())
    return 0
