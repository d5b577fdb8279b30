"""`instrument VERB ARGUMENTS`: the verbs, and the conversion of their errors to exit codes.

Each verb except `run` and `plan` is a module of this package, which `python -m instrument.VERB` runs too. Without a verb, the
arguments are those of `run`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from pydantic_core import to_jsonable_python

from ..errors import ConfigError, InstrumentError, Problem, similar_names

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 160  # of tables that are written to a file or a pipe
Main = Callable[[argparse.Namespace], int]
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
        "reference": "compare a run with healthy runs",
        "diff": "find the first difference between two runs",
        "replay": "repeat steps of a run with other hooks",
        "explain": "say what a configuration key, kind, statistic, rule, column, error or Python name means",
    },
    "Files and sweeps": {
        "sweep": "list the jobs of a sweep, and run unfinished ones (--rerun)",
        "export": "export a run to CSV, TensorBoard, W&B, MLflow or Trackio, or its tensors to safetensors",
        "upload": "send the files of a run to a remote folder",
        "compact": "merge small Parquet files",
        "recover": "convert the journal of a killed run to Parquet",
        "convert": "convert a configuration of another tool to an experiment",
    },
    "Shell": {"completion": "print the script that completes verbs, options and overrides in bash, zsh or fish"},
}
ALL = {verb: text for verbs in VERBS.values() for verb, text in verbs.items()}
EXAMPLES = """\
  instrument run +exp=mnist_hooks                     run an experiment
  instrument plan +exp=mnist_hooks                    show what it would do
  instrument run -m +exp=mnist_hooks seed=0,1,2       run a sweep: one job for each value
  instrument report runs/mnist_hooks/...              write the report of a run
"""


def overview() -> str:
    lines = {name: "".join(f"  {verb:<12}{text}\n" for verb, text in verbs.items()) for name, verbs in VERBS.items()}
    groups = (f"{name}:\n{verbs}" for name, verbs in lines.items())
    more = "instrument VERB --help describes a verb. instrument run --help lists models, datasets and hook sets.\n"
    return "\n".join(["usage: instrument VERB ARGUMENTS\n", *groups, f"Examples:\n{EXAMPLES}", more])


def parser_of(verb: str) -> argparse.ArgumentParser:
    """Return the parser of a verb, without arguments. Its help shows how the command line called the verb."""
    program = f"instrument {verb}" if _verb == [verb] else f"python -m instrument.{verb}"
    return _Parser(prog=program, description=f"{ALL[verb][0].upper()}{ALL[verb][1:]}.")


class _Parser(argparse.ArgumentParser):
    """Also names the choices and options that are similar to an invalid one."""

    def error(self, message: str) -> NoReturn:
        if found := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            similar = similar_names(found[1], re.findall(r"\w+", found[2]))
        elif found := re.search(r"unrecognized arguments: (--[^\s=]+)", message):
            verbs = (action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction))
            parsers = (self, *itertools.chain(*(each.values() for each in verbs)))
            similar = similar_names(found[1], itertools.chain(*(each._option_string_actions for each in parsers)))
        else:
            similar = []
        message += f"; similar: {', '.join(similar)}" if similar else ""
        super().error(message)


_verb: list[str] = []
"""The verb of the command line; empty without one."""


def add_json(parser: argparse._ActionsContainer) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def print_json(value: object) -> None:
    """Print a value as JSON. Dataclasses become objects, and data frames lists of objects. NaN and infinity become null."""
    plain = to_jsonable_python(value, inf_nan_mode="null", fallback=_content)
    print(json.dumps(plain, indent=1))  # ASCII, which all outputs can encode


def _content(value: Any) -> Any:
    if hasattr(value, "to_dict"):
        return value.to_dict("records")
    if hasattr(value, "tolist"):  # of NumPy
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else str(value)


def wide_console() -> Console:
    """Return a console for tables. Without a terminal, it has a fixed width."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    return console


def with_arguments(
    command_line: Callable[[], argparse.ArgumentParser], *, intermixed: bool = False
) -> Callable[[Main], Callable[..., int]]:
    """Wrap the main function of a verb: it parses the arguments, prints an `InstrumentError` to stderr, and returns its exit code."""

    def wrap(main: Main) -> Callable[..., int]:
        def wrapped(arguments: Sequence[str] | None = None) -> int:
            parser = command_line()
            args = parser.parse_intermixed_args(arguments) if intermixed else parser.parse_args(arguments)
            try:
                return main(args)
            except InstrumentError as error:
                return _print_error(error)

        return wrapped

    return wrap


def _print_error(error: InstrumentError) -> int:
    """Print an error, in the first process of torchrun only, and return its exit code."""
    if "LOCAL_RANK" not in os.environ or os.environ.get("RANK", "0") == "0":  # other systems set only RANK
        print(error, file=sys.stderr)
    return error.exit_code


def run_verb() -> None:
    """Run the verb of the command line. Without one, the command `instrument` lists the verbs. Return if it is `run` or `plan`, with
    the arguments of `python -m instrument` in `sys.argv`.

    Raises:
        SystemExit: Another verb ended, or there is no such verb.
    """
    verb, arguments = "".join(sys.argv[1:2]), sys.argv[2:]
    is_command = Path(sys.argv[0]).stem == "instrument"
    if not arguments and (verb in ("-h", "--help", "help") or (is_command and not verb)):
        print(overview(), end="")
        sys.exit()
    if verb == "run":
        sys.argv[1:] = arguments
    elif verb == "plan":
        plan = f"plan={'json' if '--json' in arguments else 'true'}"
        arguments = [each for each in arguments if each != "--json"]
        # Next to the first override, because Hydra reads no overrides on both sides of an option.
        at = next((at for at, each in enumerate(arguments) if re.match(r"[^-].*=|[+~]", each)), len(arguments))
        sys.argv[1:] = [*arguments[:at], plan, *arguments[at:]]
    elif verb in ALL:
        module = import_module(f"{__package__}.{verb}")
        if verb == "verify" and not {"-h", "--help"}.isdisjoint(arguments):
            print(module.__doc__)  # Hydra has the same help for all configurations
            sys.exit()
        sys.argv = [str(module.__file__), *arguments]  # as `python -m` sets it, for the command in run.json
        _verb[:] = [verb]
        sys.exit(module.main())
    elif re.fullmatch("[A-Za-z]+", verb):
        problem = Problem("", "there is no such verb", verb, [*ALL], similar_names(verb, ALL))
        sys.exit(_print_error(ConfigError(problem)))
