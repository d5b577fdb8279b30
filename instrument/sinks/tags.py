"""Which tag, step and value a row has where scalars are shown: the same in TensorBoard, Weights & Biases and MLflow.

    train/loss                           a column of metrics, by its phase
    activations/encoder.0/mean           a column of stats or effects: hook, layer, column
    gradients/encoder.0.0/weight/l2      the path, where there is one: of a parameter its own name
    adam/encoder.0.0/weight/state.exp_avg/l2    the role, where it is not the kind's first
    activations/encoder.0/call1/mean     the number of the call, where it is not 0; likewise `backward1`
    activations.eval/encoder.0/mean      what a hook saw in evaluations; `.rank1` where there are several processes

The root is `_root_`. What a tag may not hold is an underscore in it. Whether checkpointing recomputed is left out: a call is
recorded in one of its passes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, NamedTuple

import pyarrow as pa

from ..capture.sink import Row
from ..capture.tables import IDENTITY, TABLES
from ..spec.kinds import KINDS
from ..spec.statistics import STATISTICS

Fold = Callable[[Sequence[float]], float]
"""What several values of one tag at one step are shown as."""

SHOWN = ("stats", "effects", "metrics", "distributions")  # the tables that have scalars
ROOT = "_root_"
_FORBIDDEN = re.compile(r"[^\w.-]")  # what one of the three would refuse or rename
_KEY = {column.name: place for place, column in enumerate(IDENTITY)}


class Scalar(NamedTuple):
    """One number to be shown, and what several of its tag and step are shown as."""

    tag: str
    step: int
    value: float
    fold: Fold


def scalars(table: str, row: Row) -> Iterator[Scalar]:
    """The numbers of a row; null is left out, NaN is a number."""
    if table == "distributions":
        yield from _quantiles(row)
        return
    tag = metrics_tag(row) if table == "metrics" else place_tag(row)
    for place, name, fold in _columns(table):
        value = row[place]
        if value is not None:
            yield Scalar(f"{tag}/{name}", row[0], float(value), fold)


def place_tag(row: Row) -> str:
    """Where a row with an identity comes from: its tag up to the last part, which says what is shown."""
    return _place(_WHERE(row))


def metrics_tag(row: Row) -> str:
    """The same of a row of metrics: its phase."""
    _, _, phase, rank, *_ = row
    return f"{phase}{_of_rank(rank)}"


_WHERE = itemgetter(
    *(_KEY[name] for name in ("phase", "rank", "hook", "layer", "kind", "role", "path", "call", "backward"))
)


@lru_cache(maxsize=65_536)
def _place(where: tuple[Any, ...]) -> str:
    phase, rank, hook, layer, kind, role, path, call, backward = where
    parts = [group_of(hook, phase) + _of_rank(rank), segment(layer)]
    parts += [segment(path)] if path else []
    parts += [segment(role)] if kind not in KINDS or role != KINDS[kind].roles[0] else []
    parts += [f"{name}{number}" for name, number in (("call", call), ("backward", backward)) if number]
    return "/".join(parts)


def group_of(hook: str, phase: str) -> str:
    """The first part of a tag: what was seen in evaluations stands apart."""
    return hook if phase == "train" else f"{hook}.{phase}"


def segment(name: str) -> str:
    """A name as a part of a tag."""
    return _FORBIDDEN.sub("_", name) or ROOT


def _of_rank(rank: int) -> str:
    return f".rank{rank}" if rank else ""


def _quantiles(row: Row) -> Iterator[Scalar]:
    cells = dict(zip(TABLES["distributions"].names, row, strict=True))
    for level, value in zip(cells["levels"] or (), cells["quantiles"] or (), strict=False):
        if value is not None:
            yield Scalar(f"{place_tag(row)}/quantile_{level:g}", row[0], value, _mean)


@lru_cache(maxsize=8)
def _columns(table: str) -> list[tuple[int, str, Fold]]:
    """Place, name and fold of the columns that are numbers and say what was seen, not where."""
    return [
        (place, column.name, _fold(column.name))
        for place, column in enumerate(TABLES[table].columns)
        if column.name not in _KEY and _is_number(column.type)
    ]


def _is_number(kind: Any) -> bool:
    return bool(pa.types.is_floating(kind) or pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def _fold(column: str) -> Fold:
    folds: dict[str, Fold] = {"mean": _mean, "min": min, "max": max}
    return folds[STATISTICS[column].merged] if column in STATISTICS else _mean


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
