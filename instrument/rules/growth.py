"""Growth: a value that exceeds the median of the previous values at its location many times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, TypeVar

import numpy as np
from pydantic import Field

from ..config.rules import WindowRule
from ..fields.field_types import Count
from .rule import Bounds, Firing, LocatedRule, QuietSteps, extended
from .step_rows import Chosen, FloatArray, IndexArray, StepRows

FEWEST = 2  # required previous values: a single one, such as that of weights that start at zero, is not a reference
SLACK = 4.0  # how many times smaller than the smallest value of the window the next values may be


class GrowthFields(WindowRule):
    """The fields of a rule on growth."""

    factor: Annotated[float, Field(gt=1)] = Field(
        100.0,
        description="The value exceeds this many times the median of the previous values at the same location; the square of this "
        "number, until `after` previous values exist.",
    )
    after: Count = Field(10, description="How many previous values have to exist.")


GrowthT = TypeVar("GrowthT", bound=GrowthFields)


class GrowthRule(LocatedRule[GrowthT]):
    """A statistic that grows suddenly. It fires when this begins at a location.

    The median is only computed if a value exceeds `factor` times a lower bound of it: half of the smallest positive value, since the
    median of an even number of values can be the mean of zero and this value. Before `after` values exist, the square of `factor`
    is used instead of `factor`.
    """

    saved = ("values", "count", "holds")

    def __init__(self, spec: GrowthT) -> None:
        super().__init__(spec)
        self._values = np.zeros((0, spec.window))  # the last values at each location, as a ring
        self._count = np.zeros(0, np.int64)
        self._holds = np.zeros(0, np.bool_)

    def grow(self, count: int) -> None:
        self._values = extended(self._values, count, np.nan)
        self._count, self._holds = extended(self._count, count), extended(self._holds, count)

    def bounds(self) -> Bounds | None:
        if self._holds.any():
            return None
        # If no value is below `low`, no positive median becomes smaller than half of it.
        lowest = _lowest(self._values)
        low = np.where(np.isfinite(lowest), lowest / SLACK, 0.0)
        return Bounds(self.statistics[0], low, self.spec.factor * (low / 2))

    def remembered(self) -> Sequence[str]:
        return self.statistics

    def remember(self, steps: QuietSteps) -> None:
        for layout, column, _ in steps.tables:
            chosen = self.choose(layout)
            if chosen is not None:
                self._add(chosen.slots, chosen.values(column(self.statistics[0]), self.merge))

    def _add(self, slots: IndexArray, values: FloatArray) -> None:
        """Add values [steps, slots], NaN for no value, and forget the oldest ones. Norms that overflow are left out."""
        known = np.isfinite(values)
        if not known.all():
            for each, of_step in zip(values, known, strict=True):
                self._add(slots[of_step], each[None, of_step])
            return
        self._count[slots] += len(values)
        last = values[-self.spec.window :]
        at = (self._count[slots] - np.arange(len(last), 0, -1)[:, None]) % self.spec.window
        self._values[slots, at] = last

    def check(self, rows: StepRows, chosen: Chosen) -> Iterator[Firing]:
        values, slots = chosen.values(rows.column(self.statistics[0]), self.merge), chosen.slots
        exceeded = self._exceeded(slots, values)
        self._add(slots, values[None])
        holds = np.zeros(len(values), np.bool_)
        holds[list(exceeded)] = True
        fired = np.flatnonzero(holds & ~self._holds[slots])
        self._holds[slots] = holds
        for at in fired:
            value = float(values[at])
            median, bound = exceeded[int(at)]
            text = f"{self.statistics[0]} {value:.4g}, {value / median:,.0f} times its median {median:.4g}"
            yield Firing(text, value, bound, chosen.locations[at])

    def _exceeded(self, slots: IndexArray, values: FloatArray) -> dict[int, tuple[float, float]]:
        """Return the median and the bound at those locations whose value exceeds the bound, by index in `slots`."""
        enough = self._count[slots] >= min(FEWEST, self.spec.after)
        exceeded = {}
        for at in np.flatnonzero(enough & (values > self.spec.factor * (_lowest(self._values[slots]) / 2))):
            median = float(np.nanmedian(self._values[slots[at]]))
            bound = median * self.spec.factor ** (1 if self._count[slots[at]] >= self.spec.after else 2)
            if median > 0 and values[at] > bound:
                exceeded[int(at)] = median, bound
        return exceeded


def _lowest(windows: FloatArray) -> FloatArray:
    """Return the smallest positive value of each window [..., values]; infinity without a positive value."""
    lowest: FloatArray = np.where(windows > 0, windows, np.inf).min(axis=-1)
    return lowest
