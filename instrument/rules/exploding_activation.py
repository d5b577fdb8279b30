"""Rule: the output of a layer explodes."""

from __future__ import annotations

from ..spec.rules import ExplodingActivationRule
from .growth import GrowthRule
from .step_rows import Location


class ExplodingActivation(GrowthRule[ExplodingActivationRule]):
    """See `ExplodingActivationRule`: 100 times the median of the last 50 values."""

    what = "exploding activation"
    advice = "Lower the learning rate, or add a normalization layer in front of this layer."
    requires = "an output (kind: forward) with the statistic abs_max, such as hooks=activations"
    statistics = ("abs_max",)

    def selects(self, location: Location) -> bool:
        return location.is_output
