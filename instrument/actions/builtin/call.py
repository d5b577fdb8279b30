"""Calls of a custom function that observes a tensor."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from ...config.base import ACTIONS, ObservationSpec, implementation
from ...fields.field_types import Target


@ACTIONS.register("call")
class CallSpec(ObservationSpec):
    """Call a custom function with a copy of the tensor. It returns nothing. An operation of PyTorch that changes the copy is an error."""

    action: Literal["call"]
    fn: Target = Field(
        description="A custom function, called as `fn(tensor, context)` with the additional arguments of the target."
    )
    needs_value: ClassVar[bool] = True

    def build(self, rows: Any, archive: Any) -> Any:  # noqa: ARG002
        return implementation("custom_functions:CallFunction")(self)
