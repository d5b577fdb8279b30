"""Rule: the norm of a gradient explodes."""

from __future__ import annotations

import numpy as np

from .growth import GrowthFields, GrowthRule
from .step_rows import FloatArray, IndexArray, Location


class ExplodingGradient(GrowthRule[GrowthFields], name="exploding_gradient"):
    """The `l2` of a gradient is far above the median of its previous values.

    A cliff of the loss increases the norm by orders of magnitude (Pascanu et al. 2013, https://arxiv.org/abs/1211.5063), hence
    `factor: 100`. The norm itself is not a reason to fire: it is proportional to the scale of the loss, such as a sum over samples.
    A gradient that stays below the largest of such medians hardly changes the norm of all, and does not count: its layer begins to learn,
    or it is zero except for rounding, such as that of a bias before a batch normalization.
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
        known, locations = slots[self._count[slots] > 0], list(self._slots)
        medians, roles = np.nanmedian(self._values[known], axis=1), np.array([locations[slot].role for slot in known])
        return {at: of for at, of in exceeded.items() if values[at] > medians[roles == locations[slots[at]].role].max()}
