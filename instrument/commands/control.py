"""`python -m instrument.control RUN CHANGE ...`: change a run in progress at its next step.

Exit codes: 0, the changes were made; 1, the run is not in progress, or refused them; 2, a change is invalid, or there is no run;
130, interrupted by Ctrl-C while waiting. The message is then withdrawn if the run has not read it.
"""

from __future__ import annotations

import argparse
import sys

from instrument.commands.verbs import parser_of, with_arguments
from instrument.config.run_changes import ALLOWED
from instrument.storage.control_folder import request_changes


def command_line() -> argparse.ArgumentParser:
    parser = parser_of("control")
    parser.add_argument("run", metavar="RUN", help="the folder of the run")
    parser.add_argument("changes", metavar="CHANGE", nargs="+", help=ALLOWED)
    return parser


@with_arguments(command_line)
def main(args: argparse.Namespace) -> int:
    try:
        text = "The run makes the changes when its current step ends. Ctrl-C withdraws them."
        answer = request_changes(args.run, args.changes, lambda: print(text, file=sys.stderr))
    except KeyboardInterrupt:
        return 130
    if answer.problem is not None:
        print(answer.problem, file=sys.stderr)
        return 1
    for made in answer.changes:
        print(f"after {answer.step} steps  {made}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
