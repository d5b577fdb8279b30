"""Rule: the norm of a gradient explodes."""

from __future__ import annotations

import numpy as np

from .growth import GrowthFields, GrowthRule
from .step_rows import FloatArray, IndexArray, Location


class ExplodingGradient(GrowthRule[GrowthFields], name="exploding_gradient"):
    """The `l2` of a gradient is far above the median of its previous values.

    A cliff of the loss increases the norm by orders of magnitude (Pascanu et al. 2013, https://arxiv.org/abs/1211.5063), hence
    `factor: 100`. The norm itself is not a reason to fire: it is proportional to the scale of the loss, such as a sum over samples.
    Pascanu et al. refer to the norm of all gradients. A gradient whose norm stays below the largest of such medians, of gradients of
    its kind, hardly changes it, and does not count: its layer begins to learn, or it is zero except for rounding, such as that of a
    bias before a batch normalization.
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
        locations, known = list(self._slots), slots[self._count[slots] > 0]
        largest: dict[str, float] = {}  # by role
        for slot, median in zip(known, np.nanmedian(self._values[known], axis=1), strict=True):
            role = locations[slot].role
            largest[role] = max(largest.get(role, 0.0), float(median))
        return {
            at: (median, bound)
            for at, (median, bound) in exceeded.items()
            if values[at] > largest[locations[slots[at]].role]
        }
