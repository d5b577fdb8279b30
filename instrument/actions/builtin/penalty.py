"""Penalties of `modify`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from ...config.hook_specs import FUNCTIONS, ModifySpec
from ...fields.field_types import NonNegative

if TYPE_CHECKING:
    from torch import Tensor

    from ..base import Context


@FUNCTIONS.register("l1", "l2")
class PenaltySpec(ModifySpec):
    """Add an l1 or l2 penalty to the loss, or its gradient to a gradient: coefficient * sign(v) for l1, coefficient * v for l2."""

    fn: Literal["l1", "l2"]
    coefficient: NonNegative = Field(description="The weight of the penalty. l2 equals the optimizer's weight_decay.")
    needs_value: ClassVar[bool] = True
    uses_parameters: ClassVar[bool] = True

    @model_validator(mode="after")
    def _validate_penalty_kind(self) -> PenaltySpec:
        kinds = ("loss", "parameter_grad", "parameter_grad_micro", "post_accumulate_grad", "tensor")
        if self.kind not in kinds:
            raise ValueError(
                f"{self.fn} adds a penalty to the loss, or its gradient to a gradient; "
                f"it requires one of the kinds {', '.join(kinds)}, not {self.kind}"
            )
        return self

    def change(self, tensor: Tensor, context: Context) -> Tensor:
        """Add the penalty to a loss, or its gradient to a gradient. l2 is bit-identical to weight decay of PyTorch's optimizers."""
        if self.kind == "loss":
            for parameter in context.parameters:
                if self.fn == "l1":
                    tensor = tensor + self.coefficient * parameter.abs().sum()
                else:
                    tensor = tensor + self.coefficient / 2 * parameter.square().sum()
            return tensor
        assert context.value is not None, "kinds that carry penalties hand over the value"
        value = context.value.detach()
        return tensor.add((value if self.fn == "l2" else value.sgn()).to(tensor.dtype), alpha=self.coefficient)
