"""`instrument VERB ARGUMENTS`: the verbs, and the conversion of their errors to exit codes.

Each verb but `run` and `plan` is also a module: `python -m instrument.report RUN`. Without a verb, the arguments are those of `run`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import ParamSpec

from .errors import ConfigError, InstrumentError, Problem, similar_names

Parameters = ParamSpec("Parameters")
VERBS = {
    "Train": {
        "run": "train a model with hooks, or run a sweep (-m)",
        "plan": "show which hooks match, what a run would record, and what that costs",
        "verify": "check that the record hooks of an experiment change nothing",
    },
    "Follow": {
        "watch": "follow a run or a sweep in the terminal, or in the browser (--web)",
        "control": "change a run in progress",
    },
    "Understand": {
        "report": "write one HTML page about a run or a sweep",
        "findings": "check a run with its rules",
        "diff": "find the first difference between two runs",
        "replay": "repeat steps of a run with other hooks",
    },
    "Files and sweeps": {
        "sweep": "list the jobs of a sweep, and run unfinished ones (--rerun)",
        "export": "export a run to CSV, NumPy, TensorBoard, Weights & Biases or MLflow",
        "upload": "send the files of a run to a remote folder",
        "compact": "merge small Parquet files",
        "recover": "convert the journal of a killed run to Parquet",
        "convert": "convert a configuration of another tool to an experiment",
    },
}
ALL = {verb: text for verbs in VERBS.values() for verb, text in verbs.items()}
EXAMPLES = """\
  instrument run +exp=mnist_hooks                     run an experiment
  instrument plan +exp=mnist_hooks                    show what it would do
  instrument run -m +exp=mnist_hooks seed=0,1,2       run a sweep: one job for each value
  instrument report runs/mnist_hooks/...              write the report of a run
"""


def overview() -> str:
    """Return the text of `instrument --help`."""
    groups = (
        f"{group}:\n" + "".join(f"  {verb:<10}{text}\n" for verb, text in verbs.items())
        for group, verbs in VERBS.items()
    )
    more = "instrument VERB --help describes a verb; instrument run --help lists models, datasets and hook sets.\n"
    return "\n".join(["usage: instrument VERB ARGUMENTS\n", *groups, f"Examples:\n{EXAMPLES}", more])


def program(verb: str) -> str:
    """Return how the command line calls a verb, for its `--help`."""
    return sys.argv[0] if sys.argv[0] == f"instrument {verb}" else f"python -m instrument.{verb}"


def with_exit_codes(main: Callable[Parameters, int]) -> Callable[Parameters, int]:
    """Let the main function of a verb print an `InstrumentError` to stderr, and return its exit code."""

    @wraps(main)
    def wrapped(*args: Parameters.args, **kwargs: Parameters.kwargs) -> int:
        try:
            return main(*args, **kwargs)
        except InstrumentError as error:
            print(error, file=sys.stderr)
            return error.exit_code

    return wrapped


def run_verb() -> None:
    """Run the verb of the command line. Return if it is `run` or `plan`, with the arguments of `python -m instrument` in `sys.argv`.

    Raises:
        SystemExit: Another verb ended, or there is no such verb.
    """
    verb = sys.argv[1] if len(sys.argv) > 1 else ""
    if sys.argv[1:] in (["-h"], ["--help"]):
        print(overview(), end="")
        sys.exit()
    if verb in ("run", "plan"):
        sys.argv[1:2] = ["plan=true"] * (verb == "plan")
    elif verb in ALL:
        sys.argv[:2] = [f"instrument {verb}"]
        module = import_module(f"instrument.{verb}{'.__main__' * (verb == 'report')}")
        sys.exit(module.main())
    elif re.fullmatch("[a-z]+", verb):
        error = ConfigError(Problem("", "there is no such verb", verb, [*ALL], similar_names(verb, ALL)))
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
