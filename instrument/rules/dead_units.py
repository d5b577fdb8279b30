"""Rule: many units of a layer are dead."""

from __future__ import annotations

import numpy as np

from ..spec.rules import DeadUnitsRule
from .rule import BoundsRule
from .step_rows import Location


class DeadUnits(BoundsRule[DeadUnitsRule]):
    """See `DeadUnitsRule`: more than 50% of the units (SageMaker Debugger)."""

    what = "dead units"
    advice = "Lower the learning rate, or replace the ReLU by a LeakyReLU or GELU."
    requires = "an output (kind: forward) with the statistic dead_fraction, such as hooks=dead_relu"
    statistics = ("dead_fraction",)
    merge = np.fmin

    def __init__(self, spec: DeadUnitsRule) -> None:
        super().__init__(spec)
        self.above = spec.above

    def selects(self, location: Location) -> bool:
        return location.is_output

    def describe(self, value: float) -> str:
        return f"{value:.1%} of its units are zero for a whole batch"
