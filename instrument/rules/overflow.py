"""Rule: a cast to a narrow format would limit large numbers."""

from __future__ import annotations

from typing import Annotated

import numpy as np
from pydantic import Field

from ..config.rules import FractionRule
from .rule import BoundsRule
from .step_rows import Chosen, FloatArray, StepRows


class OverflowRule(FractionRule):
    """The `overflow_fraction` of a cast is not negligible. MX formats, whose blocks limit their largest numbers, do not count.

    The threshold is the fraction at which the automatic scaling of FP8-LM reduces the scale (Peng et al. 2023, section 2.1).
    """

    above: Annotated[float, Field(ge=0, lt=1)] = Field(1e-5, description="The fraction exceeds this number.")


class Overflow(BoundsRule[OverflowRule], name="overflow"):
    what = "overflow of a cast"
    advice = "Set a smaller scale, or a format with a wider range, such as float8_e5m2. With cast.scale: previous, record more often."
    requires = "a cast, such as hooks=low_precision"
    statistics = ("overflow_fraction", "scale")

    def values(self, rows: StepRows, chosen: Chosen) -> FloatArray:
        has_scale = ~np.isnan(rows.column("scale"))
        return chosen.values(np.where(has_scale, rows.column("overflow_fraction"), np.nan), self.merge)

    def describe(self, value: float) -> str:
        return f"{value:.3%} of the numbers exceed the largest one of the format"
