"""Tags, steps and values of rows as scalars. They are the same in TensorBoard, Weights & Biases, MLflow and Trackio.

    train/loss                           a column of metrics: phase, column
    activations/encoder.0/mean           a column of stats or effects: hook, layer, column
    gradients/encoder.0.0/weight/l2      with a path, such as the name of a parameter
    adam/encoder.0.0/weight/state.exp_avg/l2    with a role other than the first one of the kind
    activations/encoder.0/call1/mean     with the index of the call if it is not 0; likewise `backward1`
    activations.eval/encoder.0/mean      recorded in an evaluation; `.rank1` with several processes

The root module is `_root_`. Characters that are not allowed in tags become underscores. The column `recompute` is
omitted, since a call is recorded in only one of its passes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

from ..tables.kinds import KINDS
from ..tables.schemas import CUSTOM, IDENTITY, TABLES
from ..tables.sink_interface import Row
from ..tables.statistics import statistic_of

Fold = Callable[[Sequence[float]], float]
"""Combines several values with the same tag and step."""

SCALAR_TABLES = tuple(name for name, table in TABLES.items() if table.has_numbers or "quantiles" in table.names)
"""The tables with scalars: numbers and quantiles."""
ROOT = "_root_"
_FORBIDDEN = re.compile(r"[^\w.-]")  # characters that one of the trackers refuses or replaces
_CUSTOM = {name: table.names.index(CUSTOM.name) for name, table in TABLES.items() if CUSTOM in table.columns}
_KEY = {column.name: index for index, column in enumerate(IDENTITY)}


class Scalar(NamedTuple):
    """One number of a row. `fold` combines several values with the same tag and step."""

    tag: str
    step: int
    value: float
    fold: Fold


def scalars(table: str, row: Row) -> Iterator[Scalar]:
    """Yield the numbers of a row. Null is omitted; NaN is a number."""
    names = TABLES[table].names
    tag = f"{row[2]}{_of_rank(row[3])}" if table == "metrics" else tag_prefix(row)
    for index, name, fold in _columns(table):
        value = row[index]
        if value is not None:
            yield Scalar(f"{tag}/{name}", row[0], float(value), fold)
    levels, quantiles = (row[names.index(name)] if name in names else None for name in ("levels", "quantiles"))
    for level, value in zip(levels or (), quantiles or (), strict=False):
        if value is not None:
            yield Scalar(f"{tag}/quantile_{level:g}", row[0], value, _mean)
    for name, value in dict(row[_CUSTOM[table]] or ()).items() if table in _CUSTOM else ():
        if value is not None:
            yield Scalar(f"{tag}/{segment(name)}", row[0], value, _mean)


def tag_prefix(row: Row) -> str:
    """Return the tag of a row with identity columns, without the last segment, which names the column."""
    return _tag_prefix(_tag_columns(row))


_tag_columns = itemgetter(
    *(_KEY[name] for name in ("phase", "rank", "hook", "layer", "kind", "role", "path", "call", "backward"))
)


@lru_cache(maxsize=65_536)
def _tag_prefix(where: tuple[Any, ...]) -> str:
    phase, rank, hook, layer, kind, role, path, call, backward = where
    group = hook if phase == "train" else f"{hook}.{phase}"
    parts = [group + _of_rank(rank), segment(layer)]
    parts += [segment(path)] if path else []
    parts += [segment(role)] if kind not in KINDS or role != KINDS[kind].roles[0] else []
    parts += [f"{name}{number}" for name, number in (("call", call), ("backward", backward)) if number]
    return "/".join(parts)


def segment(name: str) -> str:
    """Return a name as a segment of a tag."""
    return _FORBIDDEN.sub("_", name) or ROOT


def _of_rank(rank: int) -> str:
    return f".rank{rank}" if rank else ""


@lru_cache
def _columns(table: str) -> list[tuple[int, str, Fold]]:
    """Return index, name and fold of the columns with numbers."""
    folds: dict[str, Fold] = {"mean": _mean, "min": min, "max": max}
    names = TABLES[table].names
    return [(names.index(name), name, folds[statistic_of(name).merged]) for name in TABLES[table].numbers]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
