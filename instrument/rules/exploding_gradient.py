"""Rule: the norm of a gradient explodes."""

from __future__ import annotations

import numpy as np

from .growth import GrowthFields, GrowthRule
from .step_rows import FloatArray, IndexArray, Location

ROUNDING = 1e-6


class ExplodingGradient(GrowthRule[GrowthFields], name="exploding_gradient"):
    """The `l2` of a gradient is far above the median of its previous values.

    A cliff of the loss increases the norm by orders of magnitude (Pascanu et al. 2013, https://arxiv.org/abs/1211.5063), hence
    `factor: 100`. The norm itself is not a reason to fire: it is proportional to the scale of the loss, such as a sum over samples.
    The gradient of a bias before a batch normalization is zero except for rounding, and is no reference: its median is below 1e-6,
    about ten rounding units of float32, of the largest one of all gradients.
    """

    what = "exploding gradient"
    stage = "divergence"
    advice = "Clip gradients with an action clip, or lower the learning rate."
    requires = "a gradient with the statistic l2, such as hooks=gradients"
    statistics = ("l2",)

    def selects(self, location: Location) -> bool:
        return location.is_gradient

    def _exceeded(self, slots: IndexArray, values: FloatArray) -> dict[int, tuple[float, float]]:
        exceeded = super()._exceeded(slots, values)
        if not exceeded:
            return exceeded
        locations = list(self._slots)
        largest = max(float(np.nanmedian(self._values[slot])) for slot in slots[self._count[slots] > 0])
        return {
            at: (median, bound)
            for at, (median, bound) in exceeded.items()
            if median > ROUNDING * largest or not locations[slots[at]].is_of_bias
        }
