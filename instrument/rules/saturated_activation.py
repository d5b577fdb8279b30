"""Rule: many outputs of an activation function are saturated."""

from __future__ import annotations

import numpy as np

from ..spec.rules import SaturatedActivationRule
from .rule import BoundsRule
from .step_rows import Location


class SaturatedActivation(BoundsRule[SaturatedActivationRule]):
    """See `SaturatedActivationRule`: more than 50% of the values (SageMaker Debugger)."""

    what = "saturated activation"
    advice = "Use smaller initial weights or a smaller learning rate, or add normalization in front of this layer."
    requires = "an output (kind: forward) with the statistic saturated_fraction, such as hooks=dead_relu"
    statistics = ("saturated_fraction",)
    merge = np.fmin

    def __init__(self, spec: SaturatedActivationRule) -> None:
        super().__init__(spec)
        self.above = spec.above

    def selects(self, location: Location) -> bool:
        return location.is_output

    def describe(self, value: float) -> str:
        return f"{value:.1%} of its output is saturated"
