"""The spec of `action: modify` with its built-in functions, and the one with custom functions."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from ..fields.field_types import Target
from ..fields.registry import Registry
from .base import ACTIONS, InterventionSpec, implementation


@ACTIONS.register("modify")
class ModifySpec(InterventionSpec):
    """Replace the tensor by the result of `fn`."""

    action: Literal["modify"]
    straight_through: bool = Field(
        False, description="Pass the gradient through unchanged (straight-through estimator, Bengio et al. 2013)."
    )

    @model_validator(mode="after")
    def _validate_straight_through(self) -> ModifySpec:
        is_set = self.straight_through and "straight_through" in self.model_fields_set
        if is_set and self.kind not in ("forward", "forward_pre", "function"):
            raise ValueError(
                f"'straight_through' requires kind forward, forward_pre or function; kind {self.kind} changes no forward value"
            )
        return self


FUNCTIONS: Registry[type[ModifySpec]] = Registry(
    "functions",
    "function of modify",
    folder="instrument.actions.builtin",
    check=lambda entry: None if issubclass(entry, ModifySpec) else "is not a subclass of ModifySpec",
)


class FunctionSpec(ModifySpec):
    """A custom function, called as `fn(tensor, context)` with the additional arguments of the target. None keeps the tensor."""

    fn: Target
    together: bool = Field(
        False,
        description="Call the function once with all tensors of a call of the module or function: `fn(tensors, context)` gets a dict "
        "by path, and returns a dict with those that change.",
    )

    needs_value: ClassVar[bool] = True

    def build(self, rows: Any, archive: Any) -> Any:
        """Return the action."""
        return implementation("together:Together")(self, rows) if self.together else super().build(rows, archive)

    def function(self, archive: Any) -> Any:  # noqa: ARG002
        """Return the custom function."""
        return implementation("custom_functions:custom_function")(self.fn, f"hooks.{self.name}.fn", "tensor", "context")

    @model_validator(mode="after")
    def _validate_together(self) -> FunctionSpec:
        if self.together and self.condition is not None:
            raise ValueError("'together' passes several tensors, but the condition of 'when' is about each tensor")
        kinds = ("forward_pre", "forward", "full_backward_pre", "full_backward", "function", "function_grad")
        if self.together and self.kind not in kinds:
            hint = f"requires one of the kinds {', '.join(kinds)}"
            if self.kind != "tensor":
                raise ValueError(f"'together' {hint}; a site of kind {self.kind} has one tensor")
            kind = "full_backward" if self.tensor_role == "input" else "full_backward_pre"
            raise ValueError(f"'together' {hint}; for the gradients of each {self.tensor_role}, use {kind}")
        return self
