"""The fields of `action: scale`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, PlainSerializer, PlainValidator, TypeAdapter, WithJsonSchema, model_validator

from ...config.base import ACTIONS, InterventionSpec, Misfit, implementation
from ...fields.field_types import Dimension, Number


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


@ACTIONS.register("scale")
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
            message = (
                f"'reverse' requires kind forward, forward_pre or function; for kind {self.kind} use a negative factor"
            )
            raise ValueError(message)
        return self

    def build(self, rows: Any, archive: Any) -> Any:  # noqa: ARG002
        return implementation("intervention:Intervention")(implementation("scale:Scale")(self), rows)

    def misfits(self, shape: Sequence[int], complete: Sequence[int]) -> Iterator[Misfit]:  # noqa: ARG002
        if not isinstance(self.factor, tuple):
            return
        dims, given = len(shape), len(self.factor)
        if not -dims <= self.dim < dims:
            allowed = f"{-dims} to {dims - 1}, or one number as 'factor'" if dims else "one number as 'factor'"
            yield "dim", f"dim {self.dim} is out of range for", allowed
        elif shape[self.dim] != given:
            allowed = f"{shape[self.dim]} factors, one number, or another 'dim'"
            yield "factor", f"{given} factors do not fit dimension {self.dim} of", allowed
