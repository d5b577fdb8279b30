"""The narrow formats of the table `casts`, and the field `cast` of `record`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import AfterValidator, BeforeValidator, Discriminator, Field, Tag, model_validator

from ..fields.field_types import Number, Spec


class Format(NamedTuple):
    """A floating-point format, and how a tensor is divided into blocks with scales of their own."""

    mantissa: int  # bits, without the leading one
    least: int  # exponent of the smallest normal number; smaller numbers are subnormal
    largest: float
    block: int = 0  # elements
    scales: int = 0  # of blocks: 1 for powers of two (MX), 2 for amax / largest as float8_e4m3fn (NVFP4)

    @property
    def top(self) -> float:
        """The number to which `scale: previous` scales the largest magnitude: half of the largest one, because the next may be larger."""
        return self.largest / 2.0 * (448.0 if self.scales == 2 else 1.0)


FORMATS = {
    "float8_e4m3fn": Format(3, -6, 448.0),
    "float8_e5m2": Format(2, -14, 57344.0),
    "bfloat16": Format(7, -126, (2.0 - 2.0**-7) * 2.0**127),
    "float16": Format(10, -14, 65504.0),
    "mxfp8_e4m3": Format(3, -6, 448.0, 32, 1),
    "mxfp8_e5m2": Format(2, -14, 57344.0, 32, 1),
    "mxfp6_e3m2": Format(2, -2, 28.0, 32, 1),
    "mxfp6_e2m3": Format(3, 0, 7.5, 32, 1),
    "mxfp4_e2m1": Format(1, 0, 6.0, 32, 1),
    "nvfp4": Format(1, 0, 6.0, 16, 2),
}
"""The formats by name.

FP8: P. Micikevicius et al., "FP8 formats for deep learning", 2022, https://arxiv.org/abs/2209.05433. MX: OCP Microscaling Formats
Specification 1.0, sections 5 and 6.3, https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf. NVFP4:
NVIDIA, "Pretraining large language models with NVFP4", 2025, appendix C, https://arxiv.org/abs/2509.25149.
"""


def _in_range(scale: float) -> float:
    if not 1e-30 <= scale <= 1e30:  # float32 represents it and its inverse
        raise ValueError("must be a number from 1e-30 to 1e30")
    return scale


# The brackets exclude the tags from the keys in messages.
_Scale = Annotated[
    Annotated[Literal["previous"], Tag("[name]")] | Annotated[Number, AfterValidator(_in_range), Tag("[number]")],
    Discriminator(lambda value: "[name]" if isinstance(value, str) else "[number]"),
]


class Cast(Spec):
    """A cast to a narrow format."""

    to: Literal[tuple(FORMATS)] = Field(description="The format.")  # type: ignore[valid-type]
    scale: _Scale | None = Field(
        None,
        description="The factor of the elements before the cast: a number; or previous, which scales the largest magnitude of the previous "
        "recorded tensor at this location to half of the largest number of the format (delayed scaling). The cast of the first tensor is "
        "then null. The default is previous for nvfp4, otherwise 1. MX formats have only the scales of their blocks.",
    )

    @model_validator(mode="after")
    def _validate_scale(self) -> Self:
        if self.scale is not None and FORMATS[self.to].scales == 1:
            allowed = ", ".join(name for name, form in FORMATS.items() if form.scales != 1)
            raise ValueError(
                f"{self.to} has only the scales of its blocks; remove 'scale', or set 'to' to one of {allowed}"
            )
        return self


def _from_name(value: Any) -> Any:
    if value is None or isinstance(value, Mapping | Cast):
        return value
    if not isinstance(value, str):
        raise ValueError("must be the name of a format, such as float8_e4m3fn, or a mapping with 'to' and 'scale'")
    return {"to": value}


CastField = Annotated[
    Cast | None,
    BeforeValidator(_from_name, json_schema_input_type=Cast | str | None),
    Field(
        description="Record what a cast to a narrow format would lose: its name, or {to: float8_e4m3fn, scale: previous}, where scale is "
        f"previous (delayed scaling) or a number. Formats: {', '.join(FORMATS)}."
    ),
]
