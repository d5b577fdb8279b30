"""Rule: the updates of a weight are too large or too small."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from pydantic import Field

from ..config.rules import RangeRule
from ..fields.field_types import Count, Index, NonNegative
from .rule import BoundsRule, Firing, extended
from .step_rows import BoolArray, Chosen, Location, StepRows

REPLACED = 0.5  # of more than half of the weights in the first step
FROM_ZERO = 1e-4  # weights that start at zero have a ratio of 1, up to the rounding of norms


class UpdateRatioRule(RangeRule):
    """The `update_ratio` of a weight is too large or too small.

    About 1e-3 is usual (CS231n). Above 0.1, ten updates replace a weight completely. 6e-8 is the rounding unit of float32: smaller
    updates do not change a weight. An update of exactly zero is reported by `unchanged_parameter`. It also fires if the first step
    replaces more than half of the weights: their ratio is above 0.5, so that little of the initialization is left. Weights that start
    at zero have a ratio of 1, and do not count as replaced.
    A large ratio that halves does not count: small initial weights grow until their updates have a usual size.
    """

    above: NonNegative = Field(0.1, description="The ratio exceeds this number.")
    below: NonNegative = Field(1e-7, description="The ratio is below this number.")
    for_: Count = Field(10, alias="for", description="How often in succession the condition has to hold.")
    start: Index = Field(20, description="Updates before this step do not count: weights that start at zero grow fast.")


class UpdateRatio(BoundsRule[UpdateRatioRule], name="update_ratio"):
    saved = ("counts", "largest")
    what = "update ratio"
    too_large, too_small = "updates too large", "updates too small"
    stage = "updates"
    advice = "Change the learning rate of this parameter: an update of about 0.1% of the weight is usual."
    requires = "updates (kind: step_post, role: update) with the statistic update_ratio, such as hooks=parameters"
    statistics = ("update_ratio",)

    def __init__(self, spec: UpdateRatioRule) -> None:
        super().__init__(spec)
        self._largest = np.zeros(0)  # the largest value at each location since the condition began to hold

    def grow(self, count: int) -> None:
        super().grow(count)
        self._largest = extended(self._largest, count)

    def selects(self, location: Location) -> bool:
        return location.role == "update" and not location.is_of_bias

    def check(self, rows: StepRows, chosen: Chosen) -> Iterator[Firing]:
        if rows.step == 0 and self.spec.above < REPLACED:
            values = self.values(rows, chosen)
            replaced = (values > REPLACED) & (np.abs(values - 1) > FROM_ZERO)
            if 2 * replaced.sum() > len(values):
                at, count = int(np.flatnonzero(replaced)[0]), replaced.sum()
                text = f"the first update replaces {count} of {len(values)} weights: update_ratio {values[at]:.4g}"
                yield Firing(text, float(values[at]), REPLACED, chosen.locations[at], self.too_large)
        yield from super().check(rows, chosen)

    def holds(self, rows: StepRows, chosen: Chosen) -> BoolArray:
        values, slots = self.values(rows, chosen), chosen.slots
        is_outside = super().holds(rows, chosen) & (values > 0)
        if rows.step < self.spec.start or rows.metric("lr") == 0 or rows.metric("skipped"):
            is_outside[:] = False
        largest = np.where(self._counts[slots] > 0, np.fmax(self._largest[slots], values), values)
        self._largest[slots] = np.where(is_outside, largest, 0.0)
        return is_outside & ~((values > self.spec.above) & (values <= 0.5 * largest))
