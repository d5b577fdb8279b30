"""Rule: many units of a layer are dead."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from ..config.rules import FractionRule
from .rule import BoundsRule
from .step_rows import Location


class DeadUnitsRule(FractionRule):
    """The `dead_fraction` of an output is large: its units are zero for a whole batch.

    The threshold is that of AutoTrainer (Zhang et al., ICSE 2021, `gamma`). SageMaker Debugger has 0.5 (DeadRelu, `threshold_layer`),
    which healthy layers exceed if they are wider than their data have dimensions.
    """

    above: Annotated[float, Field(ge=0, lt=1)] = Field(0.7, description=FractionRule.model_fields["above"].description)


class DeadUnits(BoundsRule[DeadUnitsRule], name="dead_units"):
    what = "dead units"
    stage = "units"
    advice = "Lower the learning rate, or replace the ReLU by a LeakyReLU or GELU."
    requires = "an output (kind: forward) with the statistic dead_fraction, such as hooks=dead_relu"
    statistics = ("dead_fraction",)
    merge = np.fmin

    def selects(self, location: Location) -> bool:
        return location.is_output

    def describe(self, value: float) -> str:
        return f"{value:.1%} of its units are zero for a whole batch"
