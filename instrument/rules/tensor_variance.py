"""Rule: the output of a layer is nearly constant, or huge."""

from __future__ import annotations

import math

import numpy as np
from pydantic import Field

from ..config.rules import RangeRule
from ..fields.field_types import Count, NonNegative
from .rule import WEIGHTED, Bounds, BoundsFromZeroRule
from .step_rows import Chosen, FloatArray, Location, StepRows

ROUNDING = 1e-9  # of the square of a bound


class TensorVarianceRule(RangeRule):
    """The variance of the output of a layer with weights is tiny or huge.

    The further items of an output do not count: the attention weights of one key are all 1. SageMaker Debugger
    (TensorVariance) has 1e-5 and 10, which residual streams and small initializations leave. A tiny variance after a first one of
    exactly 0 does not count: the weights, such as `lora_B`, started at zero and have not grown yet.
    """

    below: NonNegative = Field(1e-9, description="The variance is below this number.")
    above: NonNegative = Field(1e6, description="The variance exceeds this number.")
    for_: Count = Field(5, alias="for", description="How often in succession the condition has to hold.")


class TensorVariance(BoundsFromZeroRule[TensorVarianceRule], name="tensor_variance"):
    what = "variance of an output"
    too_large, too_small = "huge output", "constant output"
    stage = "units"
    evidence = "std"
    advice = "Check the initialization and the learning rate of this layer, and whether its inputs differ."
    requires = "an output (kind: forward) of a layer with weights with the statistic std, such as hooks=activations"
    statistics = ("std",)

    def selects(self, location: Location) -> bool:
        return location.is_first_output and location.module_type in WEIGHTED

    def values(self, rows: StepRows, chosen: Chosen) -> FloatArray:
        std, numel = (chosen.values(rows.column(name), self.merge) for name in ("std", "numel"))
        return np.where(numel < 2, np.nan, std**2)  # one element has no variance

    def bounds(self) -> Bounds | None:
        bounds = super().bounds()  # of the variance
        if bounds is None:
            return None
        low = -np.inf if self.below is None else math.sqrt(self.below) * (1 + ROUNDING)
        high = np.inf if self.above is None else math.sqrt(self.above) * (1 - ROUNDING)
        return Bounds("std", low, high)

    def describe(self, value: float) -> str:
        return f"variance {value:.4g}"
