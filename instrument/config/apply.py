"""Specs of `apply`: changes made once before step 0, in the order of `nn.Module.apply` (children first)."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal, get_args

from pydantic import ConfigDict, Field, WithJsonSchema, field_validator, model_validator

from ..fields.field_types import Count, Number, Selection, Target, UnknownNameError

_KAIMING = ("a", "mode", "nonlinearity")
INIT_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "constant_": ("val",),
    "dirac_": ("groups",),
    "eye_": (),
    "kaiming_normal_": _KAIMING,
    "kaiming_uniform_": _KAIMING,
    "normal_": ("mean", "std"),
    "ones_": (),
    "orthogonal_": ("gain",),
    "sparse_": ("sparsity", "std"),
    "trunc_normal_": ("mean", "std", "a", "b"),
    "uniform_": ("a", "b"),
    "xavier_normal_": ("gain",),
    "xavier_uniform_": ("gain",),
    "zeros_": (),
}
"""The functions of `torch.nn.init` and their arguments."""


class ApplyBase(Selection):
    """The fields that all apply specs share. Each action adds its own."""

    name: str = Field("", description="The name of the spec: its key in the mapping. An item of a list can set it.")


class InitSpec(ApplyBase):
    """Initialize parameters with a function of `torch.nn.init`. Its arguments are further fields. Default `params`: weight.

    A parametrized weight is assigned, and PyTorch computes its parameters from it.
    """

    model_config = ConfigDict(extra="allow")

    action: Literal["init"]
    fn: Annotated[str, WithJsonSchema({"enum": list(INIT_FUNCTIONS)})] = Field(
        description="A function of torch.nn.init, such as kaiming_normal_."
    )

    @field_validator("fn")
    @classmethod
    def _validate_fn(cls, value: str) -> str:
        if value not in INIT_FUNCTIONS:
            raise UnknownNameError("function of torch.nn.init", value, tuple(INIT_FUNCTIONS))
        return value

    @model_validator(mode="after")
    def _validate_finite(self) -> InitSpec:
        for name, value in self.arguments.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} must be finite, not {value}")
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of the function, in addition to the parameter."""
        return dict(self.model_extra or {})


class FillSpec(ApplyBase):
    """Fill parameters with a constant."""

    action: Literal["fill"]
    value: Number = Field(description="The constant.")


class FreezeSpec(ApplyBase):
    """Freeze parameters: `requires_grad = False`."""

    action: Literal["freeze"]


class ReplaceSpec(ApplyBase):
    """Replace each matching module by a new one, under all of its names."""

    action: Literal["replace"]
    module: Target = Field(description="The new module.")


class WrapSpec(ApplyBase):
    """Wrap each matching module, under all of its names. It is the first argument of the wrapper."""

    action: Literal["wrap"]
    module: Target = Field(description="The wrapper.")


class SetSpec(ApplyBase):
    """Set an existing attribute of the module, such as `inplace`."""

    action: Literal["set"]
    attribute: str = Field(min_length=1, description="The name of the attribute.")
    value: Any = Field(description="Its new value.")

    @field_validator("value")
    @classmethod
    def _validate_not_nan(cls, value: Any) -> Any:
        if isinstance(value, float) and math.isnan(value):
            raise ValueError("must not be NaN")
        return value


class AddParameterSpec(ApplyBase):
    """Register a new parameter on the module, before the optimizer is created."""

    action: Literal["add_parameter"]
    parameter: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="The name of the parameter.")
    shape: tuple[Count, ...] = Field((), description="The shape; empty for a scalar.")
    value: Number = Field(0.0, description="The initial value.")


class ApplyCallSpec(ApplyBase):
    """Call a custom function as `fn(module, name)` with the additional arguments of the target."""

    action: Literal["call"]
    fn: Target


ApplySpec = InitSpec | FillSpec | FreezeSpec | ReplaceSpec | WrapSpec | SetSpec | AddParameterSpec | ApplyCallSpec

ACTIONS: dict[str, type[ApplyBase]] = {
    get_args(spec.model_fields["action"].annotation)[0]: spec for spec in get_args(ApplySpec)
}
