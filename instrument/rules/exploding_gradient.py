"""Rule: the norm of a gradient explodes."""

from __future__ import annotations

from ..spec.rules import ExplodingGradientRule
from .growth import GrowthRule
from .step_rows import Location


class ExplodingGradient(GrowthRule[ExplodingGradientRule]):
    """See `ExplodingGradientRule`: 100 times the median of the last 50 values."""

    what = "exploding gradient"
    advice = "Clip gradients with an action clip, or lower the learning rate."
    requires = "a gradient with the statistic l2, such as hooks=gradients"
    statistics = ("l2",)

    def selects(self, location: Location) -> bool:
        return location.is_gradient
