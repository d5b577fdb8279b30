"""The rows of one step as rules see them: the statistics as columns of numbers, the metrics, and the targets of samples."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..spec.kinds import KINDS
from ..spec.schedule import STEP_PHASES
from ..spec.statistics import ALL

FloatArray = np.ndarray[Any, np.dtype[np.float64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]
IndexArray = np.ndarray[Any, np.dtype[np.int64]]
TARGETS = "targets"
"""The name of the number of targets of a step, next to the metrics."""
_NO_TARGETS: FloatArray = np.empty(0)

NON_FINITE_FRACTION, MASK_FRACTION = 0.01, 0.5
"""The fraction of NaN and infinite elements from which the statistics of a row are invalid: of gradients, parameters and
updates, and of other tensors, in which infinities may be a mask."""


def is_gradient(kind: str, role: str) -> bool:
    """Return whether a role of a kind is a gradient."""
    return "grad" in role or kind == "tensor"


def non_finite_fraction(kind: str, role: str) -> float:
    """Return the fraction of NaN and infinite elements from which the statistics of a tensor are invalid."""
    is_strict = is_gradient(kind, role) or KINDS[kind].family != "module"
    return NON_FINITE_FRACTION if is_strict else MASK_FRACTION


def location_name(layer: str, path: str, kind: str) -> str:
    """Return the name of a location.

    Examples are `encoder.0.weight` for a parameter, `lstm[1]` for an item of a module's value, and `.` for the root.
    """
    name = layer or "."
    if not path:
        return name
    if KINDS[kind].family != "module":
        return f"{layer}.{path}" if layer else path
    return f"{name}[{path}]"


class Location(NamedTuple):
    """Where rows of statistics come from: all rows of a location are values of the same tensor at different steps.

    Attributes:
        hook: The hook.
        layer: The name of the module; empty for the root.
        module_type: Its class.
        kind: The kind of the hook.
        role: The role of the tensor.
        path: The path of the tensor, or the name of the parameter.
        phase: The phase.
    """

    hook: str
    layer: str
    module_type: str
    kind: str
    role: str
    path: str
    phase: str

    def __str__(self) -> str:
        phase = "" if self.phase == "train" else f", {self.phase}"
        return f"{location_name(self.layer, self.path, self.kind)} {self.role} ({self.hook}{phase})"

    @property
    def is_gradient(self) -> bool:
        """Whether the tensor is a gradient."""
        return is_gradient(self.kind, self.role)

    @property
    def is_of_bias(self) -> bool:
        """Whether the tensor belongs to a bias, whose gradient can cancel out in a healthy training."""
        return "bias" in self.path

    @property
    def is_output(self) -> bool:
        """Whether the tensor is the output of a module."""
        return self.kind == "forward" and self.role == "output"


class Site(NamedTuple):
    """The identity of one row within its step; see the table `stats`."""

    hook: str
    layer: str
    module_type: str
    kind: str
    role: str
    path: str
    recompute: bool


@dataclass(frozen=True)
class Chosen:
    """The rows that a rule reads in all steps with the same layout.

    Attributes:
        rows: The indices of the rows, int64 [chosen rows].
        slots: The index of the state of each location, int64 [chosen locations].
        locations: The locations.
        index: The index in `locations` of each row, int64 [chosen rows]; None if each location has one row.
    """

    rows: IndexArray
    slots: IndexArray
    locations: list[Location]
    index: IndexArray | None

    def values(self, column: FloatArray, merge: np.ufunc) -> FloatArray:
        """Return one value per location. Several rows of a location are merged; NaN, a missing value, is ignored."""
        values = column[self.rows]
        if self.index is None:
            return values
        merged = np.full(len(self.locations), np.nan)
        merge.at(merged, self.index, values)
        return merged


class Bounds(NamedTuple):
    """Bounds of a statistic or of a metric within which a rule does not fire.

    Attributes:
        name: The name of the statistic or of the metric.
        low: The smallest value: one number, or that of each location in the order of the rule, float64 [slots].
        high: The largest value.
        steps: For how many steps this is certain. Default: all.
    """

    name: str
    low: float | FloatArray
    high: float | FloatArray
    steps: int = sys.maxsize


class Locations:
    """The locations of a run, numbered in the order in which they first appear.

    A budget samples other rows in every step. What depends on a location only is therefore computed once for each location,
    and not for each layout.

    Attributes:
        all: The locations by number.
    """

    def __init__(self) -> None:
        self.all: list[Location] = []
        self._numbers: dict[Location, int] = {}
        self._limits: list[float] = []
        self._rows: dict[tuple[str, Hashable], tuple[int, bool]] = {}  # number, and whether it is recomputed

    def layout(self, rows: Sequence[Any], phase: str, site_of: Callable[[Any], Site]) -> Layout:
        """Return the layout of the rows of a step.

        Args:
            rows: The identity of each row in any form, in the order in which the rows were recorded.
            phase: The phase.
            site_of: Converts an identity to a site.
        """
        known = self._rows
        for row in rows:
            if (phase, row) not in known:
                site = site_of(row)
                known[phase, row] = self._number(Location(*site[:-1], phase)), site.recompute
        cells = [known[phase, row] for row in rows]
        numbers = np.array([number for number, _ in cells], np.int64)
        recomputed = np.array([recompute for _, recompute in cells], np.bool_)
        return Layout(self.all, numbers, recomputed, np.array(self._limits)[numbers])

    def _number(self, location: Location) -> int:
        if location not in self._numbers:
            self._numbers[location] = len(self.all)
            self.all.append(location)
            self._limits.append(non_finite_fraction(location.kind, location.role))
        return self._numbers[location]


class Layout:
    """The locations of the rows of a step. Most steps have the layout of an earlier step.

    Args:
        locations: The locations of the run by number.
        numbers: The number of the location of each row, int64 [rows].
        recomputed: Whether a row is of a recomputed forward pass, bool [rows].
        limits: The number of NaN and infinite elements, as a fraction, from which a row is invalid, float64 [rows].

    Attributes:
        numbers, limits: See above.
    """

    def __init__(
        self, locations: Sequence[Location], numbers: IndexArray, recomputed: BoolArray, limits: FloatArray
    ) -> None:
        self.limits = limits
        self._locations = locations
        self.numbers = numbers
        self._recomputed = recomputed
        self._has_repeats = len(set(numbers.tolist())) < len(numbers)
        self._chosen: dict[Hashable, Chosen | None] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    def without_rows(self) -> Layout:
        """Return the layout of a step without rows in the same run."""
        return Layout(self._locations, self.numbers[:0], self._recomputed[:0], self.limits[:0])

    @property
    def locations(self) -> list[Location]:
        """The location of each row, in the order in which the rows were recorded."""
        return [self._locations[number] for number in self.numbers.tolist()]

    def choose(self, key: Hashable, slots: Callable[[Sequence[Location]], IndexArray]) -> Chosen | None:
        """Return the rows at the locations that a rule reads, without recomputed ones. None if there are none.

        Args:
            key: The rule; the result is kept for it.
            slots: Returns the index of the state of each location of the run; -1 for a location that the rule does not read.
        """
        if key not in self._chosen:
            self._chosen[key] = self._choose(slots(self._locations))
        return self._chosen[key]

    def _choose(self, slots: IndexArray) -> Chosen | None:
        rows = np.flatnonzero((slots[self.numbers] >= 0) & ~self._recomputed)
        if not len(rows):
            return None
        numbers, index = self.numbers[rows], None
        if self._has_repeats:
            unique, first, index = np.unique(numbers, return_index=True, return_inverse=True)
            in_order = np.argsort(first)
            numbers, index = unique[in_order], np.argsort(in_order)[index]
        return Chosen(rows, slots[numbers], [self._locations[number] for number in numbers.tolist()], index)


class Statistics(Protocol):
    """The statistics of rows."""

    @property
    def numbers(self) -> FloatArray | None:
        """The first statistics of `ALL` as one matrix, float64 [rows, statistics]; None if it is unknown."""

    def column(self, name: str) -> FloatArray:
        """Return a statistic of all rows: float64 [rows], NaN for no value."""


@dataclass(frozen=True)
class Columns:
    """Statistics that a function returns by name; see `Statistics`."""

    column: Callable[[str], FloatArray]
    numbers: FloatArray | None = None


@dataclass(frozen=True)
class KernelStatistics:
    """Rows without other statistics than `numbers`; see `Statistics`."""

    numbers: FloatArray

    def column(self, name: str) -> FloatArray:
        """Return a statistic of all rows: float64 [rows], NaN for no value."""
        at = _INDEX.get(name, len(ALL))
        return self.numbers[:, at] if at < self.numbers.shape[1] else np.full(len(self.numbers), np.nan)


_INDEX = {name: index for index, name in enumerate(ALL)}
_NO_ROWS = KernelStatistics(np.empty((0, 0)))


class StepRows:
    """The rows of one step and phase.

    Args:
        step: The step.
        phase: The phase.
        layout: The locations of the rows of statistics, in the order in which they were recorded.
        statistics: The statistics of these rows.
        metrics: The row of the table `metrics`; None without metrics.
        targets: The targets of samples, float64 [samples]; NaN for no number. Default: none.

    Attributes:
        step, phase, layout, metrics, targets: See above.
        is_readable: Whether `Statistics.numbers` has all rows.
    """

    def __init__(
        self,
        step: int,
        phase: str,
        layout: Layout,
        statistics: Statistics,
        metrics: Mapping[str, Any] | None = None,
        targets: FloatArray | None = None,
    ) -> None:
        self.step = step
        self.phase = phase
        self.layout = layout
        self.metrics = metrics
        self.targets = _NO_TARGETS if targets is None else targets
        self.is_readable = statistics.numbers is not None
        self._column = statistics.column
        self._columns: dict[str, FloatArray] = {}
        self._invalid: BoolArray | None = None  # rows with many non-finite elements; empty if there are none

    def __len__(self) -> int:
        return len(self.layout)

    def counts(self, name: str) -> FloatArray:
        """Return `numel`, `nan_count` or `inf_count` of all rows, also of those with many non-finite elements."""
        return self._column(name)

    def column(self, name: str) -> FloatArray:
        """Return a statistic of all rows, float64 [rows]. Rows with many non-finite elements have no value (NaN)."""
        if name not in self._columns:
            values, invalid = self._column(name), self._find_invalid()
            self._columns[name] = np.where(invalid, np.nan, values) if len(invalid) else values
        return self._columns[name]

    def non_finite(self) -> FloatArray:
        """Return the number of NaN and infinite elements of all rows, float64 [rows]."""
        return np.nan_to_num(self.counts("nan_count")) + np.nan_to_num(self.counts("inf_count"))

    @cached_property
    def has_non_finite(self) -> bool:
        """Whether any row counts NaN or infinite elements."""
        return bool((self.counts("nan_count") > 0).any() or (self.counts("inf_count") > 0).any())

    def _find_invalid(self) -> BoolArray:
        if self._invalid is None:
            self._invalid = np.empty(0, np.bool_)
            if self.has_non_finite:
                counts = self.non_finite()
                numel = np.nan_to_num(self.counts("numel"))
                self._invalid = (counts > 0) & (counts >= self.layout.limits * numel)
        return self._invalid

    def metric(self, name: str) -> float | None:
        """Return a metric of the step; None if there is no value."""
        value = None if self.metrics is None else self.metrics.get(name)
        return None if value is None else float(value)

    @property
    def is_training(self) -> bool:
        """Whether these are the rows of a training step."""
        return self.phase == "train"

    @property
    def when(self) -> str:
        """The step in words, such as `at step 12`."""
        if self.phase in STEP_PHASES:
            return f"at step {self.step}"
        return f"in the {'probe batch' if self.phase == 'probe' else 'evaluation'} after {self.step} steps"


class StepBlock:
    """Successive steps of one phase, which rules can read together. All steps with rows of statistics have the same layout.

    Args:
        phase: The phase.
        layout: The layout of the steps with rows, or that of no rows.

    Attributes:
        phase, layout: See above.
        steps: The steps.
        metrics: For each step, the row of the table `metrics`; None without metrics.
        targets: For each step, the targets of samples, float64 [samples]; None without targets.
        with_rows: The indices of the steps with rows, in order.
        numbers: For each of these steps, the first statistics of `ALL`, float64 [rows, statistics].
        others: For each of these steps, all statistics; None if `numbers` has all.
        is_readable: Whether `numbers` is complete.
    """

    def __init__(self, phase: str, layout: Layout) -> None:
        self.phase = phase
        self.layout = layout
        self.steps: list[int] = []
        self.metrics: list[Mapping[str, Any] | None] = []
        self.targets: list[FloatArray | None] = []
        self.with_rows: list[int] = []
        self.numbers: list[FloatArray] = []
        self.others: list[Statistics | None] = []
        self.is_readable = True

    def append(
        self,
        step: int,
        metrics: Mapping[str, Any] | None,
        targets: FloatArray | None = None,
        numbers: FloatArray | None = None,
        statistics: Statistics | None = None,
    ) -> None:
        """Append a step. Its rows, if it has any, have the layout of the block.

        Args:
            step: The step.
            metrics: Its row of the table `metrics`; None without metrics.
            targets: The targets of its samples, float64 [samples]; NaN for no number. None without targets.
            numbers: The first statistics of `ALL` of its rows, float64 [rows, statistics]; None if they are unknown.
            statistics: All statistics of its rows; None if `numbers` has all. Without rows, both are None.
        """
        if numbers is not None or statistics is not None:
            self.with_rows.append(len(self.steps))
            self.others.append(statistics)
            if numbers is None:
                self.is_readable = False
            else:
                self.numbers.append(numbers)
        self.steps.append(step)
        self.metrics.append(metrics)
        self.targets.append(targets)

    def __len__(self) -> int:
        return len(self.steps)

    def __getitem__(self, at: int) -> StepRows:
        """Return the rows of the step with an index."""
        row = bisect_left(self.with_rows, at)
        if row == len(self.with_rows) or self.with_rows[row] != at:
            layout, statistics = self.layout.without_rows(), None
        else:
            layout, statistics = self.layout, self.others[row] or KernelStatistics(self.numbers[row])
        return StepRows(self.steps[at], self.phase, layout, statistics or _NO_ROWS, self.metrics[at], self.targets[at])


class QuietSteps:
    """Steps in which no value is outside of the bounds of the rules that read them.

    Args:
        losses: The losses of the training steps that have one.
        tables: The layout and the statistics of successive steps with rows: float64 [steps, rows, statistics]; see
            `StepRows.numbers`.

    Attributes:
        losses, tables: See above.
    """

    def __init__(self, losses: Sequence[float], tables: Sequence[tuple[Layout, FloatArray]]) -> None:
        self.losses = losses
        self.tables = tables


def quiet_values(numbers: FloatArray, chosen: Chosen, statistic: str, merge: np.ufunc) -> FloatArray:
    """Return the values of a statistic of the kernel, float64 [steps, chosen locations]; see `Chosen.values`.

    Args:
        numbers: The statistics of steps; see `QuietSteps.tables`.
        chosen: The rows that the rule reads.
        statistic: The name of the statistic.
        merge: How several rows of a location are merged.
    """
    columns = numbers[:, :, ALL.index(statistic)]
    if chosen.index is None:
        return columns[:, chosen.rows]
    return np.stack([chosen.values(column, merge) for column in columns])


def time_order(moment: tuple[int, str]) -> tuple[int, bool, str]:
    """Return the sort key of a step and phase: an evaluation and the probe batch precede the step with their number."""
    step, phase = moment
    return step, phase in STEP_PHASES, phase
