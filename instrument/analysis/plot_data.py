"""Preparation of statistics for plots: locations in forward order, groups of steps, and matrices of values.

All functions take DataFrames with the columns of the tables, so they work on a run, a part of a run, or several runs.
"""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import takewhile
from typing import NamedTuple

import numpy as np
import pandas as pd

from ..errors import InstrumentError, Problem, similar_names
from ..formatting import shorten
from ..rules.step_rows import is_gradient, location_name
from ..tables.kinds import KINDS
from ..tables.schemas import TABLES
from ..tables.statistics import ALL, COUNTS, statistic_of
from .finite import NON_FINITE_COUNTS, finite_only
from .frames import is_known
from .run_tables import RunTables

KEYS = ("hook", "kind", "role", "phase")
PLACE = ("layer", "path", "call", "backward")
NOT_CUSTOM = frozenset({"run", "seed", *(column.name for column in TABLES["stats"].stored)})
"""Columns of `stats` that are not custom statistics. Those of a sweep with the overrides have dots in their names."""
UNKNOWN_ORDER = 1 << 30  # sort position of layers without a known order


@dataclass(frozen=True, order=True)
class RecordedSeries:
    """The data that one record hook recorded in one phase."""

    hook: str
    kind: str
    role: str
    phase: str

    @property
    def label(self) -> str:
        """A label such as `activations: forward output`, with the phase unless it is train."""
        return f"{self.hook}: {self.kind} {self.role}" + (f" ({self.phase})" if self.phase != "train" else "")

    @property
    def is_gradient(self) -> bool:
        """Whether the recorded tensors are gradients."""
        return is_gradient(self.kind, self.role)

    @property
    def is_of_parameters(self) -> bool:
        """Whether the locations are parameters rather than modules."""
        return KINDS[self.kind].family != "module"

    @property
    def problem_counts(self) -> tuple[str, ...]:
        """The counts of elements that are a problem. Infinite attention scores are masked keys."""
        return ("nan_count",) if self.role == "scores" else NON_FINITE_COUNTS

    def shown_first(self, names: Sequence[str]) -> str:
        """Return the statistic to show first: a usual one, or the first one that does not count elements; empty without any."""
        usual = ("l2", "rms", "abs_max") if self.is_of_parameters or self.is_gradient else ("std", "rms", "mean")
        measured = (name for name in names if name not in COUNTS)
        return next((name for name in (*usual, *measured, *names) if name in names), "")

    def of(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the rows of a table that belong to the series, without recomputed forward passes."""
        mask = ~frame["recompute"].astype(bool)
        for key in KEYS:
            mask &= frame[key] == getattr(self, key)
        return frame[mask]


class Batch(NamedTuple):
    """The batch of a recorded tensor."""

    phase: str
    step: int
    micro_step: int
    rank: int


@dataclass(frozen=True)
class PlottedTensor:
    """The identity of a row of the tensors table."""

    series: RecordedSeries
    layer: str
    path: str  # in the value of the module, such as `softmax.0`; or the name of the parameter
    call: int
    backward: int
    batch: Batch
    dtype: str
    shape: tuple[int, ...]
    source_shape: tuple[int, ...]

    @property
    def location(self) -> str:
        """The name of the location, as in other plots."""
        return location_name(self.layer, self.path, self.series.kind)

    def read(self, run: RunTables | pd.DataFrame) -> np.ndarray:
        """Return the recorded values."""
        place = {name: getattr(self, name) for name in PLACE}
        where = {**vars(self.series), **self.batch._asdict(), **place, "recompute": False}
        if isinstance(run, RunTables):
            rows = run.tensors(**where)
        else:
            rows = run[reduce(operator.and_, (run[name] == value for name, value in where.items()))]
        values: np.ndarray = rows["values"].iloc[0]
        return values


def recorded_tensors(run: RunTables | pd.DataFrame) -> list[PlottedTensor]:
    """Return all recorded tensors of dtypes that NumPy supports, without those of recomputed forward passes."""
    columns = list(dict.fromkeys([*KEYS, *PLACE, *Batch._fields, "dtype", "shape", "source_shape", "recompute"]))
    frame = run.read("tensors", columns) if isinstance(run, RunTables) else run[columns]
    frame = frame[~frame["recompute"].astype(bool) & frame["dtype"].map(is_known).astype(bool)]
    tensors = []
    for row in frame.to_dict("records"):
        series, batch = RecordedSeries(*(row[key] for key in KEYS)), Batch(*(row[name] for name in Batch._fields))
        shape, source_shape = (tuple(map(int, row[name])) for name in ("shape", "source_shape"))
        layer, path, call, backward = (row[name] for name in PLACE)
        tensors.append(PlottedTensor(series, layer, path, call, backward, batch, row["dtype"], shape, source_shape))
    return tensors


@dataclass(frozen=True)
class Matrix:
    """One number for each location and group of steps."""

    locations: list[str]  # in forward order
    first: np.ndarray  # the first step of each group
    last: np.ndarray
    values: np.ndarray  # float64 [locations, groups]; NaN for missing values

    @property
    def is_grouped(self) -> bool:
        """Whether any group has more than one step."""
        return bool((self.first != self.last).any())


def series_in(frame: pd.DataFrame) -> list[RecordedSeries]:
    """Return the series of a table in order of first appearance."""
    return [RecordedSeries(*row) for row in frame.loc[:, list(KEYS)].drop_duplicates().itertuples(index=False)]


def statistics_in(frame: pd.DataFrame) -> list[str]:
    """Return the statistics with at least one value in a table: built-in ones, then custom ones.

    A custom statistic is a further column of floating-point numbers.
    """
    custom = [name for name in map(str, frame) if name not in NOT_CUSTOM and name.isidentifier()]
    numbers = [name for name in custom if pd.api.types.is_float_dtype(frame[name])]
    names = (name for name in (*ALL, *numbers) if name in frame and statistic_of(name).unit != "bits")
    return [name for name in names if frame[name].notna().any()]


def row_locations(frame: pd.DataFrame, order: Sequence[str]) -> pd.Series:
    """Return the location of each row as an ordered categorical, by an order of layers; others come last, as they appear."""
    rank = rank_in(order)
    names = {(layer, path): name for (layer, path, _), name in location_names(frame).items()}
    ordered = sorted(names, key=lambda at: rank(at[0]))  # stable: paths stay as they appear
    labels = list(dict.fromkeys(names[at] for at in ordered))
    cells = [names[at] for at in zip(frame["layer"], frame["path"], strict=True)]
    return pd.Series(pd.Categorical(cells, categories=labels, ordered=True), index=frame.index, name="location")


def forward_order(run: RunTables | pd.DataFrame) -> list[str]:
    """Return the names of a model's modules in the order in which they return their outputs.

    The order is taken from the first step at which outputs of the most layers were recorded. A module without recorded
    outputs follows the modules that are defined before it. Without any outputs, the order of definition is used. For a
    DataFrame, only modules with recorded outputs are returned.
    """
    if isinstance(run, pd.DataFrame):
        return _first_outputs(run)
    defined = list(dict.fromkeys(run.read("layers", ["layer"])["layer"]))
    return in_forward_order(defined, _first_outputs(run.read("stats", ["layer", "kind", "role", "phase", "step"])))


def rank_in(order: Sequence[str]) -> Callable[[str], int]:
    """Return a function that returns the sort position of a layer in an order; other layers come last."""
    ranks = {layer: rank for rank, layer in enumerate(order)}
    return lambda layer: ranks.get(layer, UNKNOWN_ORDER)


def in_forward_order(defined: Sequence[str], recorded: Sequence[str]) -> list[str]:
    """Return all names: recorded ones in their order, each other one after the modules that are defined before it."""
    ranks = {layer: (rank, 0) for rank, layer in enumerate(recorded)}
    entered = {"": -1}  # sort position of the last module that ends before a module begins
    previous: tuple[str, ...] = ()
    for index, layer in enumerate(defined):
        parts = layer.split(".")
        above = (*(".".join(parts[:end]) for end in range(len(parts), 0, -1)), "")
        over = [ranks[name][0] for name in previous if name not in above and name in ranks]
        entered[layer] = max(over, default=entered.get(above[min(1, len(above) - 1)], -1))
        ranks.setdefault(layer, (entered[layer] if layer else UNKNOWN_ORDER, index + 1))
        previous = above
    return sorted(ranks, key=lambda layer: ranks[layer])


def _first_outputs(stats: pd.DataFrame) -> list[str]:
    outputs = stats[(stats["kind"] == "forward") & (stats["role"] == "output")]
    if outputs.empty:
        return []
    moments = [list(dict.fromkeys(rows["layer"])) for _, rows in outputs.groupby(["phase", "step"], sort=False)]
    fullest = max(moments, key=len)  # max returns the first step with the most layers
    return list(dict.fromkeys([*fullest, *outputs["layer"]]))


@dataclass(frozen=True)
class StepGroups:
    """Groups of consecutive steps."""

    first: np.ndarray  # the first step of each group
    last: np.ndarray
    number: pd.Series  # the index of the group of each step, indexed by step

    def __len__(self) -> int:
        return len(self.first)


def groups_of(steps: Iterable[int], most: int) -> StepGroups:
    """Split steps into at most `most` groups of nearly equal size."""
    unique_steps = np.unique(np.fromiter(steps, np.int64))
    bounds = np.linspace(0, len(unique_steps), min(most, len(unique_steps)) + 1).round().astype(np.int64)
    numbers = np.searchsorted(bounds[:-1], np.arange(len(unique_steps)), side="right") - 1
    number = pd.Series(numbers, index=unique_steps, dtype=np.int64)
    return StepGroups(unique_steps[bounds[:-1]], unique_steps[bounds[1:] - 1], number)


def matrices(frame: pd.DataFrame, columns: Sequence[str], order: Sequence[str], most: int) -> dict[str, Matrix]:
    """Return columns of a table as matrices by location and group of steps.

    Several values of a location and group are merged by the rule of the statistic: the largest for maxima and counts,
    the smallest for minima, the mean for the others. Non-finite rows (see `finite`) contribute only their counts.
    """
    groups = groups_of(frame["step"], most)
    keyed = finite_only(frame).assign(location=row_locations(frame, order), group=frame["step"].map(groups.number))
    ways = {name: statistic_of(name).merged for name in columns}
    merged = keyed.groupby(["location", "group"], observed=True)[list(columns)].agg(ways)
    locations = list(keyed["location"].cat.categories)
    result = {}
    for name in columns:
        table = merged[name].unstack("group").reindex(index=locations, columns=range(len(groups)))
        result[name] = Matrix(locations, groups.first, groups.last, table.to_numpy(np.float64))
    return result


def series_where(frame: pd.DataFrame, does_fit: Callable[[pd.DataFrame], bool]) -> list[RecordedSeries]:
    """Return the series of a table whose rows fulfill a condition, in order of first appearance."""
    return [series for series in series_in(frame) if does_fit(series.of(frame))]


def select_series(candidates: Sequence[RecordedSeries], **fields: str | None) -> RecordedSeries:
    """Return the one series with the given fields: of several phases, `train`. Raise an InstrumentError with the candidates."""
    wanted = {key: word for key, word in fields.items() if word is not None}
    for key, word in wanted.items():
        check_choice(word, [getattr(series, key) for series in candidates], key, "no data with this value was recorded")
    fitting = [s for s in candidates if all(getattr(s, key) == word for key, word in wanted.items())]
    if "phase" not in wanted:
        fitting = [series for series in fitting if series.phase == "train"] or fitting
    if len(fitting) == 1:
        return fitting[0]
    given = ", ".join(f"{key}={word!r}" for key, word in wanted.items())
    problem = f"several series match {given}".rstrip() if fitting else f"no series matches all of {given}"
    arguments = (", ".join(f"{key}={getattr(series, key)!r}" for key in KEYS) for series in fitting or candidates)
    raise InstrumentError("\n    ".join([f"{problem}; select one of", *arguments]))


def check_choice(word: object, options: Sequence[str], where: str, message: str, fix: str = "") -> None:
    """Raise an InstrumentError, with the options and similar ones, unless a word is one of the options."""
    choices = list(dict.fromkeys(options))
    if word not in choices:
        allowed = shorten([name or "''" for name in choices])
        raise InstrumentError(Problem(where, message, repr(word), allowed, similar_names(str(word), choices), fix))


def location_names(rows: pd.DataFrame) -> dict[tuple[str, str, str], str]:
    """Return the names of the locations in a table, as shown in plots, by layer, path and kind."""
    locations = rows[["layer", "path", "kind"]].drop_duplicates()
    triples = zip(locations["layer"], locations["path"], locations["kind"], strict=True)
    return {triple: location_name(*triple) for triple in triples}


def rows_at(rows: pd.DataFrame, name: str) -> pd.DataFrame:
    """Return the rows of a location, or of all locations of a layer: `encoder.0.weight`, `encoder.0`, `.` for the root module."""
    mask = pd.Series(False, index=rows.index)
    for (layer, path, kind), location in location_names(rows).items():
        if location == name:
            mask |= (rows["layer"] == layer) & (rows["path"] == path) & (rows["kind"] == kind)
    return rows[mask if mask.any() else rows["layer"] == ("" if name == "." else name)]


def select_location(frame: pd.DataFrame, name: str, **wanted: str | None) -> tuple[RecordedSeries, str, pd.DataFrame]:
    """Return the one series that matches and has rows at a location, or at a layer with a single one; its name; and the rows of both.

    Raise an InstrumentError if the location has no rows, several series match, or the layer has several locations.
    """
    names = [*location_names(frame).values(), *(layer or "." for layer in frame["layer"].drop_duplicates())]
    check_choice(name, names, "layer", "nothing was recorded for this layer")
    series = select_series(series_where(frame, lambda rows: not rows_at(rows, name).empty), **wanted)
    rows = rows_at(series.of(frame), name)
    locations = list(dict.fromkeys(location_names(rows).values()))
    if len(locations) > 1:
        raise InstrumentError(f"layer: {name} has several tensors; select one of {', '.join(locations)}")
    return series, locations[0], rows


def evenly_spaced(count: int, most: int) -> list[int]:
    """Return up to `most` evenly spaced indices of `count` items, including the first and the last."""
    return sorted(set(np.linspace(0, count - 1, min(count, most)).round().astype(int).tolist()))


def short_names(names: Sequence[str], most: int) -> dict[str, str]:
    """Return a unique short name for each name.

    First the common prefix is removed. Then words are abbreviated, but numbers are kept. Then the beginning is cut. A
    name whose short form is not unique stays longer than `most`.
    """
    split = [name.split(".")[:-1] for name in names if "." in name.strip(".")]
    common = takewhile(lambda parts: len(set(parts)) == 1, zip(*split, strict=False))
    shared = len([*common]) if len(split) > 1 else 0  # the last segment of a name is never removed
    rests = {name: ".".join(name.split(".")[shared:]) for name in names}
    forms = [rests, *({name: _abbreviated(rests[name], letters) for name in names} for letters in (4, 3, 2, 1))]
    forms.append({name: text if len(text) <= most else f"…{text[1 - most :]}" for name, text in forms[-1].items()})
    chosen = dict(zip(names, names, strict=True))
    for form in forms:
        long = [name for name in names if len(chosen[name]) > most]
        tried = {**chosen, **{name: form[name] for name in long}}
        counts = Counter(tried.values())
        chosen |= {name: tried[name] for name in long if counts[tried[name]] == 1}
    return chosen


def _abbreviated(name: str, letters: int) -> str:
    """Abbreviate the words of all segments except the last: `enc.lay_11.self_att.in_proj_weight`."""
    *above, last = name.split(".")
    return ".".join([*(re.sub(r"[^\W\d_]+", lambda word: word[0][:letters], part) for part in above), last])
