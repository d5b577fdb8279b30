"""Rule: the updates of a weight are too large or too small."""

from __future__ import annotations

import numpy as np

from ..spec.rules import UpdateRatioRule
from .rule import BoundsRule
from .step_rows import BoolArray, Chosen, Location, StepRows


class UpdateRatio(BoundsRule[UpdateRatioRule]):
    """See `UpdateRatioRule`: outside of 1e-7 (rounding of float32) to 0.1; about 1e-3 is usual (CS231n)."""

    what = "update ratio"
    advice = "Change the learning rate of this parameter: an update of about 0.1% of the weight is usual."
    requires = "updates (kind: step_post, role: update) with the statistic update_ratio, such as hooks=parameters"
    statistics = ("update_ratio",)

    def __init__(self, spec: UpdateRatioRule) -> None:
        super().__init__(spec)
        self.above, self.below = spec.above, spec.below

    def selects(self, location: Location) -> bool:
        return location.role == "update" and not location.is_of_bias

    def holds(self, rows: StepRows, chosen: Chosen) -> BoolArray:
        if rows.step < self.spec.start or rows.metric("lr") == 0 or rows.metric("skipped"):
            return np.zeros(len(chosen.locations), np.bool_)
        return super().holds(rows, chosen)
