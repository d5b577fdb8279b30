"""Functions of `modify` that draw random elements."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field

from ...config.hook_specs import FUNCTIONS, ModifySpec
from ...fields.field_types import Count, NonNegative, Number, number_to_text

if TYPE_CHECKING:
    from torch import Tensor

    from ..base import Context


@FUNCTIONS.register("noise")
class NoiseSpec(ModifySpec):
    """Add Gaussian noise from a separate generator. It depends on the seed, hook, step, layer and call only."""

    fn: Literal["noise"]
    std: NonNegative = Field(description="The standard deviation of the noise, in the unit of the tensor.")
    mean: Number = Field(0.0, description="The mean of the noise.")

    def change(self, tensor: Tensor, context: Context) -> Tensor:
        """Add the noise. The gradient passes through."""
        import torch

        generator = context.generator(tensor.device)
        drawn = torch.randn(tensor.shape, generator=generator, device=tensor.device, dtype=tensor.dtype)
        return tensor + (drawn * self.std + self.mean)


@FUNCTIONS.register("dropout")
class DropoutSpec(ModifySpec):
    """Set each element to zero with probability p and scale the others by 1 / (1 - p), also in evaluations."""

    fn: Literal["dropout"]
    p: Annotated[Number, Field(ge=0, lt=1)] = Field(description="The probability of zero.")

    def change(self, tensor: Tensor, context: Context) -> Tensor:
        import torch

        kept = torch.rand(tensor.shape, generator=context.generator(tensor.device), device=tensor.device) >= self.p
        return torch.where(kept, tensor / (1.0 - self.p), torch.zeros((), dtype=tensor.dtype, device=tensor.device))


@FUNCTIONS.register("nan")
class NanSpec(ModifySpec):
    """Insert NaN or infinity at random positions, to test error handling."""

    fn: Annotated[Literal["nan"], BeforeValidator(number_to_text)]
    count: Count = Field(1, description="Number of elements to replace.")
    value: Annotated[Literal["nan", "inf", "-inf"], BeforeValidator(number_to_text)] = Field(
        "nan", description="The inserted value."
    )

    def change(self, tensor: Tensor, context: Context) -> Tensor:
        """Set `count` elements, drawn without replacement, to the value. All elements if there are fewer."""
        import torch

        generator = context.generator(tensor.device)
        indices = torch.randperm(tensor.numel(), generator=generator, device=tensor.device)[: self.count]
        mask = torch.zeros(tensor.numel(), dtype=torch.bool, device=tensor.device)
        mask.index_fill_(0, indices, True)  # `mask[indices] = True` copies a number from the host and waits
        return tensor.masked_fill(mask.view(tensor.shape), float(self.value))
