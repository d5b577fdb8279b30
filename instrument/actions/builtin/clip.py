"""The fields of `action: clip`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from ...config.base import ACTIONS, InterventionSpec, implementation
from ...fields.field_types import NonNegative, Number

Fraction = Annotated[Number, Field(gt=0, le=1)]


@ACTIONS.register("clip")
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
            message = "'scope: all' has one norm of all tensors, but the condition of 'when' is about each tensor"
            raise ValueError(message)
        if self.scope == "sample" and self.definition.family != "module":
            raise ValueError(f"'scope: sample' requires a batch dimension, which kind {self.kind} does not have")
        if self.ratio is not None and self.definition.family != "parameter":
            raise ValueError(f"'ratio' compares a gradient with its weight, which kind {self.kind} does not have")
        return self

    @property
    def norm_scope(self) -> Literal["tensor", "sample", "all"]:
        """The scope, or its default for the kind."""
        return self.scope or ("all" if self.kind == "parameter_grad" and self.condition is None else "tensor")

    def build(self, rows: Any, archive: Any) -> Any:  # noqa: ARG002
        return implementation("intervention:Intervention")(implementation("clip:Clip")(self), rows)
