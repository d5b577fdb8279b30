"""`instrument.diff(a, b)` and `python -m instrument.diff A B`: compare what two runs recorded, layer by layer.

The command prints a summary and a table of the layers. `--json` prints all layers.

Exit codes: 0, no difference exceeds the tolerance; 1, the runs differ; 2, the arguments are invalid, or the runs have
nothing in common.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pandas as pd
from rich.table import Table

from instrument.commands.verbs import add_json, parser_of, print_json, wide_console
from instrument.comparison.diff import diff
from instrument.comparison.result import Diff, number_text, place_cells, records, ulp_text
from instrument.errors import ConfigError, InstrumentError, InstrumentWarning, Problem

MAX_LISTED = 40  # rows of a table
NUMBERS = ("difference", "at step", "differs from step")
STATISTICS = ("mean", "std", "rms", "min", "max")  # columns of the table, as many as fit
STATISTIC_WIDTH = 8  # characters of a column, such as 0.00063, with the space after it


def command_line() -> argparse.ArgumentParser:
    parser = parser_of("diff")
    parser.add_argument("a", metavar="A", help="the folder or the remote address of a run, or a folder of tensors")
    parser.add_argument("b", metavar="B", help="the same for the other run")
    text = "layers of A with another name in B, such as encoder=backbone; for a folder of tensors also expressions, "
    text += "such as 'h.*.c_attn=cat(blocks.*.q, blocks.*.k, blocks.*.v)'"
    parser.add_argument("--rename", metavar="OLD=NEW", nargs="+", default=[], help=text)
    text = "the relative difference above which tensors differ"
    parser.add_argument("--tolerance", metavar="X", type=float, help=text)
    text = "compare only these steps, such as 0:100 for steps 0 to 99"
    parser.add_argument("--steps", metavar="FIRST:END", default=":", help=text)
    text = "read folders as tensors that other programs wrote, also if they contain a run"
    parser.add_argument("--as", dest="form", choices=["foreign"], help=text)
    add_json(parser)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    args = command_line().parse_args(arguments)
    try:
        with warnings.catch_warnings(action="ignore", category=InstrumentWarning):
            rename, steps, foreign = dict(map(_renamed, args.rename)), _steps(args.steps), args.form == "foreign"
            difference = diff(args.a, args.b, rename=rename, tolerance=args.tolerance, steps=steps, foreign=foreign)
    except InstrumentError as error:
        print(error, file=sys.stderr)
        return 2
    if args.json:
        names = ("is_identical", "is_within_tolerance", "suspect")
        values = {name: value for name, value in vars(difference).items() if name != "infos"}
        print_json({**{name: getattr(difference, name) for name in names}, "summary": str(difference), **values})
    else:
        print(difference)
        if not difference.is_identical and len(difference.layers):
            _print_tables(difference)
    return 0 if difference.is_within_tolerance else 1


def _renamed(entry: str) -> tuple[str, str]:
    old, _, new = entry.partition("=")
    if not (old and new):
        raise ConfigError(Problem("--rename", "must be OLD=NEW", entry))
    return old, new


def _steps(text: str) -> tuple[int | None, int | None]:
    """Parse a range of steps, such as `0:100`. A missing bound is None."""
    first, colon, end = text.partition(":")
    if not colon or not all(part.isdigit() for part in (first, end) if part):
        raise ConfigError(Problem("--steps", "must be a range such as 0:100", text))
    return int(first) if first else None, int(end) if end else None


def _print_tables(difference: Diff) -> None:
    """Print the layers and the recorded tensors. Of more than `MAX_LISTED`, print the most important ones; see `_listed`."""
    console = wide_console()
    listed = _listed(difference)
    rows, layers = records(listed), records(difference.layers)

    def style(row: dict[str, Any]) -> str:
        return "bold" if row["difference"] > row["tolerance"] and not difference.cause else ""

    cells = [place_cells(row) for row in rows]
    used = sum(max(map(len, column)) + 1 for column in zip(*cells, strict=True)) + len("  ".join(NUMBERS))
    room = max(0, (console.width - used) // STATISTIC_WIDTH)
    statistics = [name for name in STATISTICS if name in difference.statistics][:room]
    table = _table("layer", "tensor", *NUMBERS, *statistics)
    for row, texts in zip(rows, cells, strict=True):
        numbers = [number_text(row[name]) for name in ("difference", "step", "first_step", *statistics)]
        table.add_row(*texts, *numbers, style=style(row))
    if difference.statistics or difference.tensors.empty:  # otherwise the table of tensors has all differences
        console.print("\nlargest relative differences, in the order of execution:", table)
    if (rest := len(difference.layers) - len(rows)) > 0:
        print(f"... and {rest:,} more: --json prints all")
    if len(difference.tensors):
        noise = {"noise": "noise", "ratio": "L2 / noise"} if difference.noise else {}
        columns = ("elements", "L2", *noise.values(), "cosine", "max abs", "max rel")
        table = _table("layer", "tensor", *columns, "units in the last place")
        tensors = difference.tensors[difference.tensors.index.isin(listed.index)]
        for row in records(tensors.reset_index()):
            numbers = [number_text(row[name]) for name in ("elements", "l2", *noise, "cosine", "max_abs", "max_rel")]
            layer = layers[row["location"]]
            table.add_row(*place_cells(layer), *numbers, ulp_text(row["ulp"]), style=style(layer))
        console.print("\nrecorded tensors, element by element:", table)


def _listed(difference: Diff) -> pd.DataFrame:
    """Return the rows of `layers` to print: of many, those above the tolerance, or those with the largest differences."""
    layers = difference.layers
    above = layers[layers["difference"] > layers["tolerance"]]
    if len(layers) <= MAX_LISTED:
        return layers
    return above.head(MAX_LISTED) if len(above) else layers.nlargest(MAX_LISTED, "difference").sort_index()


def _table(*names: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in names:
        is_text = name in ("layer", "tensor", "units in the last place")
        table.add_column(name, overflow="fold", justify="left" if is_text else "right", no_wrap=not is_text)
    return table


class _CallableModule(ModuleType):
    """This module. `import instrument.diff` binds it to the name of the function, like which it can be called."""

    __call__ = staticmethod(diff)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    sys.exit(main())
