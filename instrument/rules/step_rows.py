"""The rows of one step as rules see them: the statistics as columns of numbers, the metrics, and the targets of samples."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from ..config.schedule import STEP_PHASES
from ..tables.kinds import KINDS

FloatArray = np.ndarray[Any, np.dtype[np.float64]]
BoolArray = np.ndarray[Any, np.dtype[np.bool_]]
IndexArray = np.ndarray[Any, np.dtype[np.int64]]
Numbers = tuple[Sequence[int], FloatArray]
"""The statistics of rows, as their indices in `ALL`, and float64 [statistics, rows]. The indices are the same object in all steps with
the same ones."""
_NO_TARGETS: FloatArray = np.empty(0)
FURTHER_ITEMS = frozenset("123456789")  # how the path of an item of a sequence after the first one begins

NON_FINITE_FRACTION, MASK_FRACTION, SCORES_FRACTION = 0.01, 0.5, 1.0
"""The fraction of NaN and infinite elements from which the statistics of a row are invalid: of gradients, parameters and
updates, of other tensors, in which infinities may be a mask, and of attention scores, in which they are one."""


def is_gradient(kind: str, role: str) -> bool:
    return "grad" in role or kind == "tensor"


def non_finite_fraction(kind: str, role: str) -> float:
    """Return the fraction of NaN and infinite elements from which the statistics of a tensor are invalid."""
    if role == "scores":
        return SCORES_FRACTION
    is_strict = is_gradient(kind, role) or KINDS[kind].family != "module"
    return NON_FINITE_FRACTION if is_strict else MASK_FRACTION


def location_name(layer: str, path: str, kind: str) -> str:
    """Return a location's name: `encoder.0.weight` for a parameter, `lstm[1]` for an item of a module's value, `.` for the root."""
    name = layer or "."
    if not path:
        return name
    if KINDS[kind].family != "module":
        return f"{layer}.{path}" if layer else path
    return f"{name}[{path}]"


def location_label(name: str, role: str, hook: str, phase: str) -> str:
    """Return a location with its tensor, such as `encoder.0 output (activations)`; `name` is a `location_name`."""
    return f"{name} {role} ({hook}{'' if phase == 'train' else f', {phase}'})"


def hook_and_role(label: str) -> tuple[str, str]:
    """Return the hook and the role of a `location_label`."""
    tensor, _, hook = label.rpartition(" (")
    return hook.rstrip(")").partition(",")[0], tensor.rpartition(" ")[2]


class Location(NamedTuple):
    """Where rows of statistics come from: all rows of a location are values of the same tensor at different steps."""

    hook: str
    layer: str  # the name of the module; empty for the root
    module_type: str
    kind: str
    role: str
    path: str  # the path of the tensor, or the name of the parameter
    phase: str

    def __str__(self) -> str:
        return location_label(location_name(self.layer, self.path, self.kind), self.role, self.hook, self.phase)

    @property
    def is_gradient(self) -> bool:
        return is_gradient(self.kind, self.role)

    @property
    def is_of_parameter(self) -> bool:
        """Whether the tensor is a parameter, its gradient or its update."""
        return self.role in ("param", "param_grad", "update")

    @property
    def is_of_bias(self) -> bool:
        """Whether the tensor belongs to a bias, whose gradient can cancel out in a healthy training."""
        return "bias" in self.path

    @property
    def is_output(self) -> bool:
        return self.kind == "forward" and self.role == "output"

    @property
    def is_first_output(self) -> bool:
        """Whether it is an output, and no further item of one, such as a mask, a position bias or attention weights."""
        return self.is_output and self.path[:1] not in FURTHER_ITEMS


class RowSite(NamedTuple):
    """The identity of one row within its step; see the table `stats`."""

    hook: str
    layer: str
    module_type: str
    kind: str
    role: str
    path: str
    recompute: bool


class RelationRow(NamedTuple):
    """A relation that was checked in a step; see the table `relations`."""

    relation: str
    layer: str
    path: str
    holds: bool | None
    value: float | None
    text: str


@dataclass(frozen=True)
class Chosen:
    """The rows that a rule reads in all steps with the same layout."""

    rows: IndexArray  # the indices of the rows, int64 [chosen rows]
    slots: IndexArray  # the index of the state of each location, int64 [chosen locations]
    locations: list[Location]
    # The index in `locations` of each row, int64 [chosen rows]; None if each location has one row.
    index: IndexArray | None

    def values(self, column: FloatArray, merge: np.ufunc) -> FloatArray:
        """Return one value per location, float64 [..., chosen locations]. NaN, a missing value, is ignored in merging.

        `column` is a statistic of all rows of a step, or of each of several steps: float64 [..., rows].
        """
        values = column[..., self.rows]
        if self.index is None:
            return values
        merged = np.full((*values.shape[:-1], len(self.locations)), np.nan)
        merge.at(merged, (..., self.index), values)  # type: ignore[arg-type]  # NumPy's types have no tuples
        return merged


class Locations:
    """The locations of a run, numbered in the order in which they first appear.

    A budget samples other rows in every step. What depends on a location only is therefore computed once for each location,
    and not for each layout.
    """

    def __init__(self) -> None:
        self.all: list[Location] = []
        self._numbers: dict[Location, int] = {}
        self._limits: list[float] = []
        self._rows: dict[tuple[str, Hashable], tuple[int, bool]] = {}  # number, and whether it is recomputed

    def layout(self, rows: Sequence[Any], phase: str, site_of: Callable[[Any], RowSite]) -> RowLayout:
        """Return the layout of the rows of a step."""
        known = self._rows
        for row in rows:
            if (phase, row) not in known:
                site = site_of(row)
                known[phase, row] = self._number(Location(*site[:-1], phase)), site.recompute
        cells = [known[phase, row] for row in rows]
        numbers = np.array([number for number, _ in cells], np.int64)
        recomputed = np.array([recompute for _, recompute in cells], np.bool_)
        return RowLayout(self.all, numbers, recomputed, np.array(self._limits)[numbers])

    def _number(self, location: Location) -> int:
        if location not in self._numbers:
            self._numbers[location] = len(self.all)
            self.all.append(location)
            self._limits.append(non_finite_fraction(location.kind, location.role))
        return self._numbers[location]


class RowLayout:
    """The locations of the rows of a step. Most steps have the layout of an earlier step.

    Args:
        numbers: The number of the location of each row, int64 [rows].
        recomputed: Whether a row is of a recomputed forward pass, bool [rows].
        limits: The number of NaN and infinite elements, as a fraction, from which a row is invalid, float64 [rows].
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

    @property
    def locations(self) -> list[Location]:
        """The location of each row, in the order in which the rows were recorded."""
        return [self._locations[number] for number in self.numbers.tolist()]

    def choose(self, key: Hashable, slots: Callable[[Sequence[Location]], IndexArray]) -> Chosen | None:
        """Return the rows at the locations that a rule reads, without recomputed ones. None if there are none.

        `slots` returns the index of the state of each location of the run; -1 for a location that the rule does not read.
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


class StepRows:
    """The rows of one step and phase.

    Attributes:
        step: The step.
        phase: The phase.
        layout: The locations of the rows of statistics, in the order in which they were recorded.
        statistic: Returns a statistic of all rows by name: float64 [rows], NaN for no value.
        metrics: The row of the table `metrics`; None without metrics.
        targets: The targets of samples, float64 [samples]; NaN for no number. Default: none.
        relations: The rows of the table `relations`. Default: none.
        numbers: The recorded statistics of `ALL` at once. None if they are not available at once.
    """

    def __init__(
        self,
        step: int,
        phase: str,
        layout: RowLayout,
        statistic: Callable[[str], FloatArray],
        metrics: Mapping[str, Any] | None = None,
        targets: FloatArray | None = None,
        *,
        numbers: Numbers | None = None,
        relations: Sequence[RelationRow] = (),
    ) -> None:
        self.step, self.phase = step, phase
        self.layout, self.metrics = layout, metrics
        self.targets = _NO_TARGETS if targets is None else targets
        self.numbers, self.relations = numbers, relations
        self._statistic = statistic
        self._columns: dict[str, FloatArray] = {}

    def __len__(self) -> int:
        return len(self.layout)

    def counts(self, name: str) -> FloatArray:
        """Return `numel`, `nan_count` or `inf_count` of all rows, also of those with many non-finite elements."""
        return self._statistic(name)

    def column(self, name: str) -> FloatArray:
        """Return a statistic of all rows, float64 [rows]. Rows with many non-finite elements have no value (NaN)."""
        if name not in self._columns:
            values, invalid = self._statistic(name), self._invalid
            self._columns[name] = np.where(invalid, np.nan, values) if len(invalid) else values
        return self._columns[name]

    def non_finite(self) -> FloatArray:
        """Return the number of NaN and infinite elements of all rows, float64 [rows]."""
        return np.nan_to_num(self.counts("nan_count")) + np.nan_to_num(self.counts("inf_count"))

    @cached_property
    def has_non_finite(self) -> bool:
        """Whether any row counts NaN or infinite elements."""
        return bool((self.counts("nan_count") > 0).any() or (self.counts("inf_count") > 0).any())

    @cached_property
    def _invalid(self) -> BoolArray:
        """Which rows have many non-finite elements; empty if no row has."""
        if not self.has_non_finite:
            return np.empty(0, np.bool_)
        counts, numel = self.non_finite(), np.nan_to_num(self.counts("numel"))
        return (counts > 0) & (counts >= self.layout.limits * numel)

    def has_no_weight(self, layer: str) -> bool:
        """Return whether a layer, and all layers before it in the backward pass, get gradients of zero, but not all layers."""
        rows = zip(self.layout.locations, self.column("zero_fraction") >= 1, strict=True)
        of_outputs = [(f".{location.layer}", is_zero) for location, is_zero in rows if location.role == "grad_output"]
        parents = {name[:at] for name, _ in of_outputs for at, letter in enumerate(name) if letter == "."} | {"."}
        first = next((at for at, (name, is_zero) in enumerate(of_outputs) if not is_zero and name not in parents), 0)
        return f".{layer}" in {name for name, is_zero in of_outputs[:first] if is_zero}

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
        names = {"probe": "probe batch", "rollout": "rollout"}
        return f"in the {names.get(self.phase, 'evaluation')} after {self.step} steps"


def time_order(moment: tuple[int, str]) -> tuple[int, bool, str]:
    """Return the sort key of a step and phase: an evaluation and the probe batch precede the step with their number."""
    step, phase = moment
    return step, phase in STEP_PHASES, phase
