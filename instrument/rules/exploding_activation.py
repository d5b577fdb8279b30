"""Rule: the output of a layer explodes."""

from __future__ import annotations

from .growth import GrowthFields, GrowthRule
from .step_rows import Location


class ExplodingActivation(GrowthRule[GrowthFields], name="exploding_activation"):
    """The `abs_max` of an output is far above the median of its previous values."""

    what = "exploding activation"
    stage = "divergence"
    advice = "Lower the learning rate, or add a normalization layer in front of this layer."
    requires = "an output (kind: forward) with the statistic abs_max, such as hooks=activations"
    statistics = ("abs_max",)

    def selects(self, location: Location) -> bool:
        return location.is_output
