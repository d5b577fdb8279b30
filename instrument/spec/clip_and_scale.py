"""Specs of `action: clip` and `action: scale`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, PlainSerializer, PlainValidator, TypeAdapter, WithJsonSchema, model_validator

from .base import InterventionSpec
from .field_types import Dimension, NonNegative, Number

Fraction = Annotated[Number, Field(gt=0, le=1)]


class ClipSpec(InterventionSpec):
    """Clip values or norms to a bound: exactly one of min/max, value, norm, quantile, ratio."""

    action: Literal["clip"]
    min: Number | None = Field(None, description="Lower bound of the values.")
    max: Number | None = Field(None, description="Upper bound of the values.")
    value: NonNegative | None = Field(None, description="Clip values to [-value, value].")
    norm: NonNegative | None = Field(None, description="Upper bound of the norm. Larger tensors are scaled down.")
    quantile: Fraction | None = Field(None, description="Clip magnitudes to this quantile of the tensor's magnitudes.")
    ratio: NonNegative | None = Field(
        None,
        description="Clip each unit's gradient norm to this fraction of its weight norm: adaptive gradient clipping (Brock et al. 2021).",
    )
    ord: Annotated[Number, Field(ge=0)] = Field(
        2.0, description="The order of the norm; .inf is the maximum norm.", allow_inf_nan=True
    )
    scope: Literal["tensor", "sample", "all"] | None = Field(
        None,
        description="The tensors of one norm: each tensor, each sample of it (dimension 0), or all tensors that the spec "
        "matches. Default: all for parameter_grad, as in clip_grad_norm_; tensor for other kinds, and with a condition in 'when'.",
    )

    @model_validator(mode="after")
    def _validate_bounds(self) -> ClipSpec:
        given = {
            "min/max": self.min is not None or self.max is not None,
            **{name: getattr(self, name) is not None for name in ("value", "norm", "quantile", "ratio")},
        }
        set_bounds = [name for name, is_set in given.items() if is_set]
        if len(set_bounds) != 1:
            raise ValueError(f"requires exactly one of {', '.join(given)}; given: {' and '.join(set_bounds) or 'none'}")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min ({self.min}) is above max ({self.max})")
        if self.norm is None and {"ord", "scope"} & self.model_fields_set:
            raise ValueError("'ord' and 'scope' require 'norm'")
        if self.scope == "all" and self.kind != "parameter_grad":
            raise ValueError("'scope: all' requires kind parameter_grad, the only kind with all tensors at once")
        if self.scope == "all" and self.condition is not None:
            raise ValueError(
                "'scope: all' has one norm of all tensors, but the condition of 'when' is about each tensor"
            )
        if self.scope == "sample" and self.definition.family != "module":
            raise ValueError(f"'scope: sample' requires a batch dimension, which kind {self.kind} does not have")
        if self.ratio is not None and self.definition.family != "parameter":
            raise ValueError(f"'ratio' compares a gradient with its weight, which kind {self.kind} does not have")
        return self

    @property
    def norm_scope(self) -> Literal["tensor", "sample", "all"]:
        """The scope, or its default for the kind."""
        return self.scope or ("all" if self.kind == "parameter_grad" and self.condition is None else "tensor")


def _factor(value: object) -> float | tuple[float, ...] | dict[int, float]:
    """Parse a number, a list of numbers, or a mapping from steps to numbers. Hydra makes the steps strings."""
    if isinstance(value, list | tuple):
        numbers = tuple(_number(item) for item in value)
        if not numbers:
            raise ValueError("a list of factors cannot be empty")
        return numbers
    if isinstance(value, Mapping):
        if not value:
            raise ValueError("a mapping from steps to factors cannot be empty")
        if invalid := [key for key in value if not str(key).isdecimal()]:
            raise ValueError(f"the keys of a mapping must be steps (integers from 0), not {invalid[0]!r}")
        return {int(key): _number(item) for key, item in value.items()}
    return _number(value)


def _number(value: object) -> float:
    return _NUMBER.validate_python(value)


_NUMBER: TypeAdapter[float] = TypeAdapter(Number, config=ConfigDict(allow_inf_nan=False))
_FACTOR_SCHEMA = {
    "anyOf": [
        {"type": "number"},
        {"type": "array", "items": {"type": "number"}, "minItems": 1},
        {"type": "object", "patternProperties": {"^[0-9]+$": {"type": "number"}}, "additionalProperties": False},
    ]
}
Factor = Annotated[
    float | tuple[float, ...] | dict[int, float],
    PlainValidator(_factor),
    PlainSerializer(lambda value: value, return_type=object),
    WithJsonSchema(_FACTOR_SCHEMA),
]


class ScaleSpec(InterventionSpec):
    """Multiply by a factor (constant, per channel, or changing over the steps), or reverse the gradient."""

    action: Literal["scale"]
    factor: Factor = Field(
        description="A number; a list with one factor per index of `dim`; or a mapping from steps to factors, interpolated linearly "
        "between steps and constant outside."
    )
    dim: Dimension = Field(1, description="The dimension of a list of factors: the channels.")
    reverse: bool = Field(
        False,
        description="Keep the value and multiply its gradient by -factor: gradient reversal (Ganin & Lempitsky 2015).",
    )

    @model_validator(mode="after")
    def _validate_dim_and_reverse(self) -> ScaleSpec:
        if "dim" in self.model_fields_set and not isinstance(self.factor, tuple):
            raise ValueError("'dim' requires a list of factors")
        if self.reverse and self.kind not in ("forward", "forward_pre", "function"):
            raise ValueError(
                f"'reverse' requires kind forward, forward_pre or function; for kind {self.kind} use a negative factor"
            )
        return self
