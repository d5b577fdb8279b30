"""Statistics as pictures need them: places in forward order, steps in groups, one number for each.

Everything here takes plain DataFrames with the columns of the tables, so that it works on a run, a part of one, or several.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ..spec.kinds import KINDS
from ..spec.statistics import ALL, STATISTICS
from .finite import finite_only, is_gradient
from .load import Run

KEYS = ("hook", "kind", "role", "phase")
AT = ("layer", "path")
UNPLACED = 1 << 30  # the rank of a layer of which nothing is known


@dataclass(frozen=True, order=True)
class Series:
    """What one record hook saw in one phase.

    Attributes:
        hook: The name of the spec.
        kind: As in `kind:`.
        role: Which of the kind's tensors.
        phase: `train` or `eval`.
    """

    hook: str
    kind: str
    role: str
    phase: str

    @property
    def label(self) -> str:
        """`activations: forward output`, and the phase where it is not train."""
        return f"{self.hook}: {self.kind} {self.role}" + (f" ({self.phase})" if self.phase != "train" else "")

    @property
    def is_gradient(self) -> bool:
        """Whether it saw gradients."""
        return is_gradient(self.kind, self.role)

    @property
    def is_of_parameters(self) -> bool:
        """Whether its places are parameters, or what belongs to them."""
        return KINDS[self.kind].family != "module"

    def of(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The rows of a table that are its own, those of repeated forward passes left out."""
        mine = ~frame["recompute"].astype(bool)
        for key in KEYS:
            mine &= frame[key] == getattr(self, key)
        return frame[mine]


@dataclass(frozen=True)
class Matrix:
    """One number for each place and group of steps.

    Attributes:
        places: Their names, in forward order; shape [places].
        first: The first step of each group; shape [groups].
        last: The last one.
        values: float64, shape [places, groups]; NaN where there is none.
    """

    places: list[str]
    first: np.ndarray
    last: np.ndarray
    values: np.ndarray

    @property
    def is_grouped(self) -> bool:
        """Whether any group has more than one step."""
        return bool((self.first != self.last).any())


def series_in(frame: pd.DataFrame) -> list[Series]:
    """The series that a table with the columns of identity has, in the order in which they first appear."""
    found = frame.loc[:, list(KEYS)].drop_duplicates()
    return [Series(*row) for row in found.itertuples(index=False)]


def statistics_in(frame: pd.DataFrame) -> list[str]:
    """The statistics of which a table has any value, in the order of the columns."""
    return [name for name in ALL if name in frame and frame[name].notna().any()]


def place_of(layer: str, path: str, kind: str) -> str:
    """What a place is called: `encoder.0.weight` for a parameter, `lstm[1]` for a part of a module's value, `.` for the root."""
    name = layer or "."
    if not path:
        return name
    if KINDS[kind].family != "module":
        return f"{layer}.{path}" if layer else path
    return f"{name}[{path}]"


def places_in(frame: pd.DataFrame, order: Sequence[str]) -> pd.Series:
    """The place of each row, as an ordered category.

    Args:
        frame: Rows of one series.
        order: Names of layers, as `forward_order` gives them; what is not among them comes last, as it appears.
    """
    ranks = {layer: rank for rank, layer in enumerate(order)}
    known = frame.loc[:, ["layer", "path", "kind"]].drop_duplicates()
    triples = zip(known["layer"], known["path"], known["kind"], strict=True)
    names = {(layer, path): place_of(layer, path, kind) for layer, path, kind in triples}
    ordered = sorted(names, key=lambda at: ranks.get(at[0], UNPLACED))  # stable: paths stay as they appear
    labels = list(dict.fromkeys(names[at] for at in ordered))
    cells = [names[at] for at in zip(frame["layer"], frame["path"], strict=True)]
    return pd.Series(pd.Categorical(cells, categories=labels, ordered=True), index=frame.index, name="place")


def forward_order(run: Run | pd.DataFrame) -> list[str]:
    """The names of a model's modules in the order in which their outputs come.

    It is read off the first step at which most layers' outputs were recorded; a module without any stands behind the ones
    that are written before it. Without outputs it is the order in which the model is written. Of a DataFrame nothing but its
    outputs is known.
    """
    if isinstance(run, pd.DataFrame):
        return _first_outputs(run)
    written = list(dict.fromkeys(run.read("layers", ["layer"])["layer"]))
    fired = _first_outputs(run.read("stats", ["layer", "kind", "role", "phase", "step"]))
    return _in_order(written, fired)


def _in_order(written: Sequence[str], fired: Sequence[str]) -> list[str]:
    """All names: those that fired in that order, each of the others behind what is written just before it and is over then."""
    ranks = {layer: (rank, 0) for rank, layer in enumerate(fired)}
    entered = {"": -1}  # for each module the rank of what is over when it begins
    before: tuple[str, ...] = ()
    for place, layer in enumerate(written):
        above = _with_those_above(layer)
        over = [ranks[name][0] for name in before if name not in above and name in ranks]
        entered[layer] = max(over, default=entered.get(above[min(1, len(above) - 1)], -1))
        ranks.setdefault(layer, (entered[layer] if layer else UNPLACED, place + 1))
        before = above
    return sorted(ranks, key=lambda layer: ranks[layer])


def _with_those_above(layer: str) -> tuple[str, ...]:
    """A module's name, and those of the modules that it is in."""
    parts = layer.split(".")
    return (*(".".join(parts[:end]) for end in range(len(parts), 0, -1)), "")


def _first_outputs(stats: pd.DataFrame) -> list[str]:
    outputs = stats[(stats["kind"] == "forward") & (stats["role"] == "output")]
    if outputs.empty:
        return []
    moments = [list(dict.fromkeys(rows["layer"])) for _, rows in outputs.groupby(["phase", "step"], sort=False)]
    fullest = max(moments, key=len)  # the first of those at which most layers were seen
    return list(dict.fromkeys([*fullest, *outputs["layer"]]))


@dataclass(frozen=True)
class Groups:
    """Steps in groups of neighbours.

    Attributes:
        first: The first step of each group; shape [groups].
        last: The last one.
        number: The group of each step, from 0, by step.
    """

    first: np.ndarray
    last: np.ndarray
    number: pd.Series

    def __len__(self) -> int:
        return len(self.first)


def groups_of(steps: Iterable[int], most: int) -> Groups:
    """Steps in at most so many groups, of nearly equal numbers."""
    known = np.unique(np.fromiter(steps, np.int64))
    bounds = np.linspace(0, len(known), min(most, len(known)) + 1).round().astype(np.int64)
    numbers = np.searchsorted(bounds[:-1], np.arange(len(known)), side="right") - 1
    return Groups(known[bounds[:-1]], known[bounds[1:] - 1], pd.Series(numbers, index=known, dtype=np.int64))


def matrices(frame: pd.DataFrame, columns: Sequence[str], order: Sequence[str], most: int) -> dict[str, Matrix]:
    """Statistics, or what interventions came to, by place and group of steps.

    Several tensors of one place and group, of several calls or steps, come to one number: the largest of the maxima and
    counts, the smallest of the minima, the mean of the others. Rows that are not finite (`finite`) have their counts alone.

    Args:
        frame: Rows of one series.
        columns: Their names.
        order: As `forward_order` gives it.
        most: Groups of steps.
    """
    groups = groups_of(frame["step"], most)
    keyed = finite_only(frame).assign(place=places_in(frame, order), group=frame["step"].map(groups.number))
    merged = keyed.groupby(["place", "group"], observed=True)[list(columns)].agg(
        {name: _merged(name) for name in columns}
    )
    places = list(keyed["place"].cat.categories)
    found = {}
    for name in columns:
        table = merged[name].unstack("group").reindex(index=places, columns=range(len(groups)))
        found[name] = Matrix(places, groups.first, groups.last, table.to_numpy(np.float64))
    return found


def _merged(column: str) -> str:
    return STATISTICS[column].merged if column in STATISTICS else "mean"
