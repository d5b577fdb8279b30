"""Rule: a statistic leaves the range that it had in healthy runs."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from pkgutil import resolve_name
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from ..config.rules import RULES, PersistentRule
from ..errors import ConfigError, Problem
from ..fields.field_types import Count, Names, NonNegative
from .reference_ranges import STARTS, Reference, key_of, phase_of
from .rule import Bounds, Firing, Part, PersistentLocatedRule
from .step_rows import BoolArray, Chosen, FloatArray, IndexArray, Location, StepRows


def _as_text(value: Any) -> Any:
    values = value if isinstance(value, list | tuple) else [value]
    return [os.fspath(each) if isinstance(each, os.PathLike) else each for each in values]


class ReferenceRule(PersistentRule):
    """A statistic leaves the range that it had in healthy runs, at the same location and in the same phase of training.

    A location is a hook, a layer, a kind, a role, a path and a phase of the loop. A phase of training is a range of steps: 0, 1, 2, 3,
    4-5, 6-7, 8-11, 12-15, 16-22, ..., two for each doubling. The range has a margin, which is a factor for statistics that are
    never negative, and a difference for the others. The logarithm of the factor, or the difference, is the larger of a floor and of

        t(1 - 1e-5, 4 (n - 1)) * s * sqrt(1 + 1 / n)

    for n runs: the prediction interval for one further value from a normal distribution (G. J. Hahn and W. Q. Meeker, Statistical
    Intervals, Wiley 1991, chapter 4), counted from the extremes of the runs. s is the standard deviation of their smallest and
    largest values between the runs, in this phase or on average over all phases, whichever is larger. Phases depend on each other,
    so they count as 4 independent ones. The floor is a factor of 1.25, 0.1 for a fraction, and a quarter of the largest absolute
    value for the others. One run has no standard deviation: its margin is the larger of its own range and a factor of 4, 0.3 for a
    fraction, and the largest absolute value for the others. The numbers are decisions of this package.

    Steps after the last phase in which the runs have values are not checked.
    """

    rule: Literal["reference"]
    from_: Annotated[Names, BeforeValidator(_as_text, json_schema_input_type=str | list[str])] = Field(
        alias="from",
        min_length=1,
        description="A file of `python -m instrument.reference make`, or healthy runs: a run, a folder of runs such as a sweep, "
        "a pattern such as `runs/healthy*`, or a list.",
    )
    stats: Names = Field(
        (), description="The statistics. The default is those of the file, or of `python -m instrument.reference make`."
    )
    margin: NonNegative = Field(
        1.0, description="How many times the margin is used: 0 for the range itself, 2 for twice the margin."
    )
    for_: Count = Field(
        2,
        alias="for",
        description="How often in succession a location has to be outside; a location that the runs recorded at fewer steps, at each.",
    )

    @cached_property
    def reference(self) -> Reference:
        """The ranges.

        Raises:
            ConfigError: `from` is neither a reference nor healthy runs, or lacks a statistic.
        """
        # Runs are read by a folder that imports this one.
        read = resolve_name("instrument.analysis.reference:read_reference")
        where = f"rules.{self.name}"
        reference: Reference = read(self.from_, self.stats, where=f"{where}.from", where_statistics=f"{where}.stats")
        return reference


@RULES.register("reference")
class ReferenceRanges(PersistentLocatedRule[ReferenceRule]):
    stage = "reference"
    what = "outside of the reference"
    advice = (
        "Compare the run with a healthy one: python -m instrument.diff. What is outside first is the most likely cause."
    )
    advice_in: ClassVar[Mapping[Part, str]] = {
        "forward": "The forward pass left its ranges first: compare the data, the initial weights, the code and the mode of this layer.",
        "backward": "The gradients left their ranges first: compare the targets, the loss function, and what changes gradients, such as "
        "accumulation, clipping, scaling and detached tensors.",
        "update": "The updates left their ranges first: compare the optimizer, its learning rate and schedule, and its parameters.",
    }
    requires = "locations of the reference"

    def __init__(self, spec: ReferenceRule) -> None:
        super().__init__(spec)
        self.reference = spec.reference
        self.statistics = spec.stats or self.reference.statistics
        self._low, self._high = self.reference.limits(self.statistics, spec.margin)
        self._of_slot = np.zeros(0, np.int64)  # the index in the reference of each slot
        self._phase = 0
        self._has_read = False

    def selects(self, location: Location) -> bool:
        return key_of(location) in self.reference.index

    def times_needed(self, slots: IndexArray) -> IndexArray:
        """A location that the runs recorded at fewer steps has to be outside at each of them."""
        has_range = np.any(np.isfinite(self._high[self._of_slot[slots], :, :-1]), axis=1)
        steps: IndexArray = np.where(has_range, np.diff(STARTS)[: has_range.shape[-1]], 0).sum(axis=1)
        return np.clip(steps, 1, self.spec.for_)

    def grow(self, count: int) -> None:
        super().grow(count)
        self._of_slot = np.array([self.reference.index[key_of(location)] for location in self._slots], np.int64)

    def update(self, rows: StepRows) -> Iterable[Firing]:
        self._phase = min(int(phase_of(rows.step)), self._low.shape[2] - 1)
        return super().update(rows)

    def holds(self, rows: StepRows, chosen: Chosen) -> BoolArray:
        below, above = self._outside(rows, chosen)
        outside: BoolArray = np.logical_or.reduce(below | above, axis=1)
        return outside

    def _outside(self, rows: StepRows, chosen: Chosen) -> tuple[BoolArray, BoolArray]:
        """Return which statistics are below and above the limits; bool [chosen locations, statistics]."""
        low, high = self._limits(chosen.slots)
        self._has_read = self._has_read or bool(np.isfinite(high).any())
        return self._values(rows, chosen, np.fmin) < low, self._values(rows, chosen, np.fmax) > high

    def _limits(self, slots: Any = slice(None)) -> tuple[FloatArray, FloatArray]:
        at = self._of_slot[slots]
        return self._low[at, :, self._phase], self._high[at, :, self._phase]

    def _values(self, rows: StepRows, chosen: Chosen, merge: np.ufunc) -> FloatArray:
        return np.stack([chosen.values(rows.column(name), merge) for name in self.statistics], axis=1)

    def bounds(self) -> list[Bounds] | None:
        if self._any:
            return None
        if self._phase == self._low.shape[2] - 1:
            return []  # the reference has ended
        low, high = self._limits()
        last = int(STARTS[self._phase + 1]) - 1
        return [Bounds(name, low[:, at], high[:, at], last=last) for at, name in enumerate(self.statistics)]

    def firing(self, rows: StepRows, chosen: Chosen, at: int) -> Firing:
        below, above = self._outside(rows, chosen)
        outside = np.flatnonzero(below[at] | above[at])
        first = int(outside[0])
        side = int(above[at, first])
        value = self._values(rows, chosen, (np.fmin, np.fmax)[side])[at, first]
        limit = self._limits(chosen.slots)[side][at, first]
        name, location = self.statistics[first], self._of_slot[chosen.slots[at]]
        low, high = (numbers[location, 0, self._phase] for numbers in self.reference.ranges([name]))
        count = len(self.reference.about["runs"])
        others = ", ".join(self.statistics[other] for other in outside[1:])
        runs = f"{count} healthy run{'s' * (count > 1)}" + (f"; also {others}" if others else "")
        text = f"{name} {value:.4g}, {('below', 'above')[side]} {limit:.4g}; {low:.4g} to {high:.4g} in {runs}"
        return Firing(text, float(value), float(limit), chosen.locations[at])

    def unread(self) -> str:
        if self._has_read:
            return ""
        message = "the run recorded no statistic at a location and in a phase of training of the reference"
        allowed = f"steps 0 to {self.reference.about['last_step']}"
        return str(Problem(f"rules.{self.spec.name}.from", message, list(self.spec.from_), allowed))

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "reference": self.reference.digest, "has_read": self._has_read}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["reference"] != self.reference.digest:
            message = "the reference has changed since the run stopped"
            fix = f"restore it from the folder of the run: references/{self.spec.name}.parquet"
            raise ConfigError(Problem(f"rules.{self.spec.name}.from", message, list(self.spec.from_), fix=fix))
        super().load_state_dict(state)
        self._has_read = state["has_read"]
