"""Rule: the error of a cast to a narrow format is larger than by rounding alone."""

from __future__ import annotations

from pydantic import Field

from ..config.rules import PersistentRule
from ..fields.field_types import Count, NonNegative
from .rule import BoundsRule


class QuantizationErrorRule(PersistentRule):
    """The `quantization_error` of a cast is large.

    A normal number is rounded to float8_e5m2, the coarsest format with 8 bits (Micikevicius et al. 2022), with a relative error of at most
    2^-3, half the distance of two numbers. The threshold is its square: a larger error shows that numbers leave the range.
    """

    above: NonNegative = Field(2.0**-6, description="The relative mean square error exceeds this number.")
    for_: Count = Field(5, alias="for", description="How often in succession the condition has to hold.")


class QuantizationError(BoundsRule[QuantizationErrorRule], name="quantization_error"):
    what = "error of a cast"
    advice = "Keep this tensor in a wider format, or set cast.scale: previous, or a format with blocks."
    requires = "a cast, such as hooks=low_precision"
    statistics = ("quantization_error",)

    def describe(self, value: float) -> str:
        return f"relative mean square error {value:.3g}"
