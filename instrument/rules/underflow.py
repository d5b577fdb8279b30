"""Rule: a cast to a narrow format would lose many small numbers."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from ..config.rules import FractionRule
from .rule import BoundsRule


class UnderflowRule(FractionRule):
    """The `underflow_fraction` of a cast is large: numbers that are not zero become zero.

    The threshold is the fraction of weight gradients below the range of float16 in a training that lost accuracy (Micikevicius et al.
    2018, "Mixed precision training", section 3.1). With 4 bits, more numbers of a normal distribution underflow.
    """

    above: Annotated[float, Field(ge=0, lt=1)] = Field(0.05, description="The fraction exceeds this number.")


class Underflow(BoundsRule[UnderflowRule], name="underflow"):
    what = "underflow of a cast"
    advice = "Normalize the tensor, or use cast.scale: previous, a format with blocks, or one with a wider range, such as float8_e5m2."
    requires = "a cast, such as hooks=low_precision"
    statistics = ("underflow_fraction",)

    def describe(self, value: float) -> str:
        return f"{value:.2%} of the numbers become zero"
