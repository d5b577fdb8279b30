"""What an apply spec can say: changes made once, before step 0, in the order of `nn.Module.apply` (children first)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, WithJsonSchema, field_validator

from .base import UnknownNameError
from .fields import Count, Number, Selection, Target

INIT_FUNCTIONS = (
    "constant_",
    "dirac_",
    "eye_",
    "kaiming_normal_",
    "kaiming_uniform_",
    "normal_",
    "ones_",
    "orthogonal_",
    "sparse_",
    "trunc_normal_",
    "uniform_",
    "xavier_normal_",
    "xavier_uniform_",
    "zeros_",
)


class ApplyBase(Selection):
    """Which modules; each action adds its own fields."""

    name: str = Field("", description="The key in the mapping; an item of a list may give its own.")


class InitSpec(ApplyBase):
    """Fill parameters by a function of `torch.nn.init`, whose arguments stand beside `fn`; weights, where `params` is not said."""

    model_config = ConfigDict(extra="allow")

    action: Literal["init"]
    fn: Annotated[str, WithJsonSchema({"enum": list(INIT_FUNCTIONS)})] = Field(
        description="A function of torch.nn.init, such as kaiming_normal_."
    )

    @field_validator("fn")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in INIT_FUNCTIONS:
            raise UnknownNameError("function of torch.nn.init", value, INIT_FUNCTIONS)
        return value

    @property
    def arguments(self) -> dict[str, Any]:
        """What is handed to the function beside the parameter."""
        return dict(self.model_extra or {})


class FillSpec(ApplyBase):
    """Set every element of the parameters to one value."""

    action: Literal["fill"]
    value: Number = Field(description="The value.")


class FreezeSpec(ApplyBase):
    """Take parameters out of training: `requires_grad = False`."""

    action: Literal["freeze"]


class ReplaceSpec(ApplyBase):
    """Put a new module in the place of each one that matches, under all of its names."""

    action: Literal["replace"]
    module: Target = Field(description="What is built for each of them.")


class WrapSpec(ApplyBase):
    """Put a module around each one that matches, under all of its names; it is handed over as the first argument."""

    action: Literal["wrap"]
    module: Target = Field(description="What is built around each of them.")


class ReprSpec(ApplyBase):
    """Give the module a label, which `print(model)` shows."""

    action: Literal["repr"]
    label: str = Field(min_length=1, description="The label.")


class SetSpec(ApplyBase):
    """Set an attribute that the module already has, such as `inplace`."""

    action: Literal["set"]
    attribute: str = Field(min_length=1, description="The attribute's name.")
    value: Any = Field(description="Its new value.")


class AddParameterSpec(ApplyBase):
    """Register one more parameter on the module, before the optimizer is built."""

    action: Literal["add_parameter"]
    parameter: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$", description="Its name.")
    shape: tuple[Count, ...] = Field((), description="Its shape; empty for a scalar.")
    value: Number = Field(0.0, description="What it is filled with.")


class CallSpec(ApplyBase):
    """Call a function of one's own, as `fn(module, name)` with the further arguments of the target."""

    action: Literal["call"]
    fn: Target


ApplySpec = InitSpec | FillSpec | FreezeSpec | ReplaceSpec | WrapSpec | ReprSpec | SetSpec | AddParameterSpec | CallSpec

ACTIONS: dict[str, type[ApplyBase]] = {
    "init": InitSpec,
    "fill": FillSpec,
    "freeze": FreezeSpec,
    "replace": ReplaceSpec,
    "wrap": WrapSpec,
    "repr": ReprSpec,
    "set": SetSpec,
    "add_parameter": AddParameterSpec,
    "call": CallSpec,
}
