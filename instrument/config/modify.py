"""The spec of `action: modify` with its built-in functions, and the one with custom functions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

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

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        is_set = self.straight_through and "straight_through" in self.model_fields_set
        if is_set and self.kind not in ("forward", "forward_pre", "function"):
            yield f"'straight_through' requires kind forward, forward_pre or function; kind {self.kind} changes no forward value"


FUNCTIONS: Registry[type[ModifySpec]] = Registry(
    "functions",
    "function of modify",
    folder="instrument.actions.builtin",
    check=lambda entry: None if issubclass(entry, ModifySpec) else "is not a subclass of ModifySpec",
)


class FunctionSpec(ModifySpec):
    """A custom function, called as `fn(tensor, context)` with the additional arguments of the target. None keeps the tensor."""

    fn: Target

    needs_value: ClassVar[bool] = True

    def function(self, archive: Any) -> Any:  # noqa: ARG002
        return implementation("custom_functions:custom_function")(self.fn, f"hooks.{self.name}.fn", "tensor", "context")
