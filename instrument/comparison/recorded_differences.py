"""The comparison of the rows and tensors that two runs recorded, a few steps at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds

from ..analysis.frames import array_of, is_known
from ..analysis.plot_data import groups_of
from ..analysis.run_tables import RunTables
from ..config.schedule import STEP_PHASES
from ..tables.kinds import KINDS
from ..tables.schemas import POSITION, SHAPE
from ..tables.statistics import ALL, REMAINDERS
from .alignment import RecordedTable, aligned, windows
from .differences import (
    NOISE_RATIO,
    PRECISIONS,
    ULP_BINS,
    Precision,
    TensorErrors,
    coarsest,
    decisive,
    is_of_values,
    relative_differences,
    rounding_noise,
    run_precision,
    tensor_errors,
)

MAX_ROWS = 100_000  # rows of statistics of a run that are read at once
MAX_BYTES = 64 * 2**20  # of the recorded tensors of a run that are read at once
MAX_COLUMNS = 200  # columns of the matrix of differences by step
VALUES = "values"  # instead of the name of a statistic, if full tensors are compared
_TENSOR_COLUMNS = ("dtype", "shape", "source_shape", "values", "data")
_DIFFERENT_SHAPE = TensorErrors(math.inf, math.nan, math.inf, math.nan, np.zeros(len(ULP_BINS), np.int64), False)


@dataclass(frozen=True)
class FirstDifference:
    """The first tensor in time and execution order whose difference exceeds the tolerance.

    Attributes:
        location: The index of its row in `Diff.layers`.
        order: Its index in the order of execution.
        statistic: The statistic that differs most, or `values` for a recorded tensor. If the tensors have different shapes, `shape`
            for a row of statistics, and `source_shape` for a recorded tensor.
        a: The statistic or the shape in the first run; NaN for `values`.
        b: The statistic or the shape in the other run; NaN for `values`.
        before: The largest relative difference before it, in earlier steps and earlier in this step.
    """

    step: int
    phase: str
    location: int
    order: int
    call: int
    statistic: str
    a: float | tuple[int, ...]
    b: float | tuple[int, ...]
    difference: float
    before: float


class Comparison:
    """Compares the tables of two runs. Each method reads a table once, in groups of steps.

    Args:
        tolerance: The relative difference above which tensors differ; None for that of the coarser precision.
        noise: For tensors of other programs, the measured rounding noise of each location, NaN where it is unknown. It determines the
            tolerances, if none is given. float64, shape [locations].
        order: For tensors of other programs, the index in the order of execution by layer, role, path, call and step.

    Attributes without a comment are those of `Diff`; `unmatched` is `unmatched_rows` there.
    """

    def __init__(
        self,
        runs: tuple[RunTables, RunTables],
        locations: pd.DataFrame,
        tables: Mapping[str, tuple[RecordedTable, RecordedTable]],
        tolerance: float | None,
        noise: np.ndarray | None = None,
        order: Mapping[Any, int] = MappingProxyType({}),
    ) -> None:
        self.runs, self.locations, self._tables = runs, locations, tables
        both = {table: one.rows.keys() & other.rows.keys() for table, (one, other) in tables.items()}
        self.steps = {table: sorted({step for _, step in rows}) for table, rows in both.items()}
        self.precisions: tuple[Precision, ...] = ()  # of the two runs, as soon as rows are compared
        self._given = tolerance
        self.tolerance = math.nan if tolerance is None else tolerance
        self.first: FirstDifference | None = None
        self.unmatched = [0, 0]  # `_aligned` adds the rows of common steps
        for table, pair in tables.items():
            common = {*self.steps[table]}
            for side, one in enumerate(pair):
                self.unmatched[side] += sum(count for (_, step), count in one.rows.items() if step not in common)
        self.other_parts = 0
        count = len(locations)
        self.tolerances, self._noise, self._order = np.full(count, self.tolerance), noise, order  # of the locations
        self._depth = np.maximum((locations["role"] == "output").to_numpy(np.int64).cumsum(), 1)
        self._terms, self._coarsest = 1, PRECISIONS["float64"]  # of all tensors so far
        self.rows = np.zeros(count, np.int64)  # the number of compared rows of statistics of each location
        self.with_bits = 0
        self.first_bits: tuple[int, int, int] | None = None
        # Whether more than counts and fractions was compared. The counts of a tensor without finite elements are enough.
        self.has_values = False
        self._before = 0.0
        self._first_step, self._step_of_largest = np.full(count, np.nan), np.full(count, np.nan)
        self._largest = np.full(count, np.nan)
        self._largest_of: dict[str, np.ndarray] = {}
        self._tensors: dict[int, dict[str, Any]] = {}
        self._groups = groups_of([step for steps in self.steps.values() for step in steps], MAX_COLUMNS)
        self._matrix = np.full((count, len(self._groups)), np.nan)
        self._is_step = locations["phase"].isin(STEP_PHASES).to_numpy(bool)
        self._is_of_module = locations["kind"].map(lambda kind: KINDS[kind].family == "module").to_numpy(bool)
        is_gradient = (locations["role"] == "param_grad").to_numpy(bool)
        self._gradients = np.where(is_gradient, locations.groupby(["phase", "kind"]).ngroup(), -1)

    @property
    def statistics(self) -> tuple[str, ...]:
        """The statistics that both runs recorded."""
        return tuple(self._largest_of)

    def compare_statistics(self) -> None:
        """Compare the rows of `stats`."""
        names = [*ALL, *(name for name in self.runs[0].custom_statistics if name in self.runs[1].custom_statistics)]
        weights: Counter[int] = Counter()
        for table in self._tables["stats"]:
            for (_, step), count in table.rows.items():
                weights[step] += count
        for steps in windows(self.steps["stats"], weights, 2 * MAX_ROWS):
            columns = [*names, *REMAINDERS.values(), POSITION.name, SHAPE.name]
            rows = self._aligned("stats", columns, (_between(steps),) * 2)
            if len(rows):
                rows = self._in_order(rows, rows[f"{POSITION.name}_a"].fillna(0))
                recorded = rows.notna().any()
                names_of_both = [name for name in names if recorded[f"{name}_a"] and recorded[f"{name}_b"]]
                self._add_statistics(rows, names_of_both)

    def compare_tensors(self) -> None:
        """Compare the recorded tensors, element by element."""
        self._before = 0.0
        for conditions in self._tensor_windows():
            rows = self._aligned("tensors", _TENSOR_COLUMNS, conditions)
            if len(rows):
                rows = rows if self._noise is None else _without_leading_ones(rows)
                places = self.locations.loc[rows["location"], ["layer", "role", "path"]].to_numpy().tolist()
                moments = rows[["call", "step", "location"]].to_numpy().tolist()
                keys = [((*place, *moment[:2]), moment[2]) for place, moment in zip(places, moments, strict=True)]
                rows = rows.assign(order=[self._order.get(key, location) for key, location in keys])
                rows = self._in_order(rows, rows["order"])
            all_errors = [_errors_of(cast("dict[str, Any]", row)) for row in rows.to_dict("records")]
            known = np.array([errors is not None for errors in all_errors], bool)
            self.other_parts += int((~known).sum())
            if known.any():
                self._add_tensors(rows[known].reset_index(drop=True), [each for each in all_errors if each is not None])

    def table(self) -> pd.DataFrame:
        """Return the locations with their differences; see `Diff.layers`."""
        return self.locations.assign(
            rows=self.rows,
            first_step=pd.array(self._first_step, "Int64"),
            difference=self._largest,
            tolerance=self.tolerances,
            step=pd.array(self._step_of_largest, "Int64"),
            **self._largest_of,
        )

    def matrix(self) -> pd.DataFrame:
        """Return the largest difference of each location at each step; see `Diff.steps`."""
        return pd.DataFrame(self._matrix, columns=pd.Index(self._groups.first, name="step"))

    def tensor_table(self) -> pd.DataFrame:
        """Return the differences of the recorded tensors; see `Diff.tensors`."""
        columns = ("tensors", "elements", "dtype_a", "dtype_b", *TensorErrors._fields)
        rows = [self._tensors[location] for location in sorted(self._tensors)]
        table = pd.DataFrame(rows, index=pd.Index(sorted(self._tensors), name="location"), columns=columns)
        if self._noise is None or self._given is not None:
            return table
        noise = self.tolerances[table.index] / NOISE_RATIO
        ratio = np.where(table["l2"] == 0.0, 0.0, table["l2"] / np.where(noise, noise, np.nan))
        return table.assign(noise=noise, ratio=ratio)

    def _aligned(self, table: str, columns: Sequence[str], conditions: Sequence[ds.Expression]) -> pd.DataFrame:
        rows, left = aligned(self.runs, table, columns, self.locations, conditions)
        self.unmatched = [total + count for total, count in zip(self.unmatched, left, strict=True)]
        return rows

    def _in_order(self, rows: pd.DataFrame, positions: pd.Series) -> pd.DataFrame:
        """Return rows in the order of execution. The evaluation after N steps precedes step N."""
        order = np.lexsort((positions, self._is_step[rows["location"]], rows["step"]))
        return rows.iloc[order].reset_index(drop=True)

    def _add_statistics(self, rows: pd.DataFrame, names: Sequence[str]) -> None:
        locations = rows["location"].to_numpy()
        if not self.precisions:
            of_modules = self._is_of_module[locations]
            self._set_precisions(rows[of_modules] if of_modules.any() else rows)
        groups = pd.Series(self._gradients[locations], rows.index)
        floors = None
        if (groups >= 0).any():
            floors = rows.assign(group=groups).groupby(["group", "step"]).ngroup().where(groups >= 0, -1)
        floor = 2 * coarsest(self.precisions).unit / self.tolerance if self.tolerance else 0.0
        differences = relative_differences(rows, names, floors, floor)
        largest, which = decisive(differences, all_decide=self.tolerance == 0)
        self.rows += np.bincount(locations, minlength=len(self.rows))
        for name in names:
            of_location = differences[name].groupby(locations).max()
            known = self._largest_of.setdefault(name, np.full(len(self.rows), np.nan))
            known[of_location.index] = np.fmax(known[of_location.index], of_location)
        if "fingerprint" in names:
            bits = differences["fingerprint"]
            self.with_bits += int(bits.notna().sum())
            if self.first_bits is None and (bits > 0).any():
                first = rows.iloc[int((bits > 0).to_numpy().argmax())]
                self.first_bits = int(first["step"]), int(first["location"]), int(first["call"])
        are_empty = [rows[f"numel_{side}"] == rows[f"nan_count_{side}"] + rows[f"inf_count_{side}"] for side in "ab"]
        self.has_values |= any(map(is_of_values, names)) or bool((are_empty[0] & are_empty[1]).any())
        self._add(rows, largest, self.tolerance, [names[index] for index in which], SHAPE.name)

    def _add_tensors(self, rows: pd.DataFrame, all_errors: Sequence[TensorErrors]) -> None:
        if not self.precisions:
            self._set_precisions(rows.iloc[:0])
        tolerance: float | np.ndarray = self.tolerance
        if self._given is None and self._noise is not None:
            tolerance = self._tolerances_of(rows)
        elif self._given is None:  # a hook may round the tensors that it records
            dtypes = [name for name in {*rows["dtype_a"], *rows["dtype_b"]} if name in PRECISIONS]
            tolerance = max([self.tolerance, *(PRECISIONS[name].tolerance for name in dtypes)])
        for row, errors in zip(rows.to_dict("records"), all_errors, strict=True):
            one = {"tensors": 1, "elements": math.prod(row["shape_a"]), **errors._asdict()}
            one |= {name: row[name] for name in ("dtype_a", "dtype_b")}
            known = self._tensors.get(row["location"])
            self._tensors[row["location"]] = one if known is None else _merged(known, one)
        self.has_values = True
        l2 = np.array([errors.l2 for errors in all_errors])
        self._add(rows, l2, tolerance, [VALUES] * len(rows), "source_shape")

    def _tolerances_of(self, rows: pd.DataFrame) -> np.ndarray:
        """Return the tolerances of tensors of other programs: `NOISE_RATIO` times the rounding noise of their locations.

        The noise is the measured one, but at least that of one rounding; `rounding_noise` where it is not measured. Integers have none.
        """
        for row in rows[["location", "dtype_a", "dtype_b", "shape_a"]].itertuples(index=False, name=None):
            location, names, shape = row[0], row[1:3], row[3]
            self._terms = max([self._terms, *shape[-1:]])
            known = [PRECISIONS[name] for name in names if name in PRECISIONS]
            noise = 0.0
            if known:
                self._coarsest = coarsest([self._coarsest, *known])
                noise = self._noise[location] if self._noise is not None else math.nan
                estimate = rounding_noise(self._coarsest, self._depth[location], self._terms)
                noise = estimate if math.isnan(noise) else max(noise, rounding_noise(coarsest(known), 1, 1))
            self.tolerances[location] = NOISE_RATIO * noise
        self.tolerance = float(np.nanmax(self.tolerances))
        return self.tolerances[rows["location"]]

    def _add(
        self,
        rows: pd.DataFrame,
        differences: np.ndarray,
        tolerance: float | np.ndarray,
        statistics: Sequence[str],
        shape: str,
    ) -> None:
        """Add the decisive differences of matched rows, which are in the order of execution. `shape` is the column of the shapes."""
        shapes = zip(rows[f"{shape}_a"], rows[f"{shape}_b"], strict=True)
        are_other = np.array([one is not None is not other and list(one) != list(other) for one, other in shapes], bool)
        differences = np.where(are_other, math.inf, differences)
        locations, steps = rows["location"].to_numpy(), rows["step"].to_numpy()
        np.fmax.at(self._matrix, (locations, self._groups.number[steps].to_numpy()), differences)
        above = differences > tolerance
        np.fmin.at(self._first_step, locations[above], steps[above].astype(np.float64))
        for row in pd.Series(differences).groupby(locations).idxmax():
            if not differences[row] <= self._largest[locations[row]]:
                self._largest[locations[row]], self._step_of_largest[locations[row]] = differences[row], steps[row]
        if above.any():
            at = int(above.argmax())
            row, name = rows.iloc[at], shape if are_other[at] else statistics[at]
            pair = [math.nan if name == VALUES else row[f"{name}_{side}"] for side in "ab"]  # type: list[Any]
            a, b = (tuple(map(int, each)) if are_other[at] else float(each) for each in pair)
            candidate = FirstDifference(
                step=int(row["step"]),
                phase=str(self.locations["phase"][row["location"]]),
                location=int(row["location"]),
                order=int(row.get("order", row["location"])),
                call=int(row["call"]),
                statistic=name,
                a=a,
                b=b,
                difference=float(differences[at]),
                before=max(self._before, float(differences[:at].max(initial=0.0))),
            )
            # At the same tensor, that of a statistic counts, which is found first.
            self.first = min((each for each in (self.first, candidate) if each is not None), key=self._moment)
        self._before = max(self._before, float(differences.max(initial=0.0)))

    def _moment(self, difference: FirstDifference) -> tuple[int, bool, int]:
        return difference.step, bool(self._is_step[difference.location]), difference.order

    def _set_precisions(self, rows: pd.DataFrame) -> None:
        sides = [{f"{name}_{side}": name for name in ("min", "max", "abs_max")} for side in "ab"]
        self.precisions = tuple(
            run_precision(run.info, rows.rename(columns=of).reindex(columns=["location", *of.values()]), table.dtypes)
            for run, of, table in zip(self.runs, sides, self._tables["tensors"], strict=True)
        )
        if math.isnan(self.tolerance):
            self.tolerance = coarsest(self.precisions).tolerance
            if self._noise is None:
                self.tolerances[:] = self.tolerance

    def _tensor_windows(self) -> Iterator[tuple[ds.Expression, ds.Expression]]:
        """Yield the conditions that select the tensors of each run that are compared next."""
        sizes = self._tables["tensors"][0].bytes
        weights: Counter[int] = Counter()
        for (step, _), size in sizes.items():
            weights[step] += size
        names = dict(zip(self.locations["layer"], self.locations["layer_b"], strict=True))
        for steps in windows(self.steps["tensors"], weights, MAX_BYTES):
            if weights[steps[0]] <= MAX_BYTES:
                yield (_between(steps),) * 2
                continue
            of_layer = {layer: sizes[steps[0], layer] for layer in names}
            for layers in windows(list(of_layer), of_layer, MAX_BYTES):
                others = [names[layer] for layer in layers]
                one, other = (ds.field("layer").isin(pa.array(each)) for each in (layers, others))
                yield _between(steps) & one, _between(steps) & other


def _between(steps: Sequence[int]) -> ds.Expression:
    """Return the condition that selects some ascending steps. Row groups are skipped by its bounds."""
    step = ds.field("step")
    return (step >= steps[0]) & (step <= steps[-1]) & step.isin(pa.array(steps))


def _without_leading_ones(rows: pd.DataFrame) -> pd.DataFrame:
    """Remove leading dimensions of size 1 if only they distinguish two shapes, such as [1, tokens] and [tokens]."""
    for name in ("shape", "source_shape"):
        pairs = [[[*one], [*other]] for one, other in zip(rows[f"{name}_a"], rows[f"{name}_b"], strict=True)]
        for pair in pairs:
            longer, shorter = sorted(pair, key=len, reverse=True)
            excess = len(longer) - len(shorter)
            if longer == [1] * excess + shorter:
                del longer[:excess]
        one, other = (pd.Series(column, rows.index) for column in zip(*pairs, strict=True))
        rows = rows.assign(**{f"{name}_a": one, f"{name}_b": other})
    return rows


def _errors_of(row: Mapping[str, Any]) -> TensorErrors | None:
    """Return the differences between two recorded tensors; None if different parts of the tensors were recorded."""
    if list(row["source_shape_a"]) != list(row["source_shape_b"]):
        return _DIFFERENT_SHAPE
    if list(row["shape_a"]) != list(row["shape_b"]) or not (is_known(row["dtype_a"]) and is_known(row["dtype_b"])):
        return None
    cells = ([row[f"{name}_{side}"] for name in ("values", "data", "shape", "dtype")] for side in "ab")
    arrays = [array_of(*each, copy=False) for each in cells]
    # A sink with `tensors: list` stores float64 as float32.
    dtypes = [
        "float32" if dtype == "float64" and array.dtype == np.float32 else dtype
        for array, dtype in zip(arrays, (row["dtype_a"], row["dtype_b"]), strict=True)
    ]
    return tensor_errors(arrays[0], arrays[1], (dtypes[0], dtypes[1]))


def _merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    total = {name: one[name] + other[name] for name in ("tensors", "elements", "ulp")}
    extreme = {name: np.fmax(one[name], other[name]) for name in ("l2", "max_abs", "max_rel")}
    dtypes = {name: (one if one["dtype_a"] != one["dtype_b"] else other)[name] for name in ("dtype_a", "dtype_b")}
    equal = {"equal_bits": one["equal_bits"] and other["equal_bits"]}
    return {**dtypes, **total, **extreme, **equal, "cosine": np.fmin(one["cosine"], other["cosine"])}
