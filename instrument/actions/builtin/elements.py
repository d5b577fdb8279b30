"""Functions of `modify` that change each element on its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ...config.hook_specs import FUNCTIONS, ModifySpec

if TYPE_CHECKING:
    from torch import Tensor

    from ..base import Context


QUANTIZED_MAX = {"int4": 7.0, "int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


@FUNCTIONS.register("zero")
class ZeroSpec(ModifySpec):
    """Replace all values by zero (zero ablation)."""

    fn: Literal["zero"]
    entrywise: ClassVar[bool] = True

    def change(self, tensor: Tensor, context: Context) -> Tensor:  # noqa: ARG002
        """Return zeros, also for NaN. The result stays in the graph with a gradient of zero."""
        import torch

        return tensor.masked_fill(torch.ones((), dtype=torch.bool, device=tensor.device), 0.0)


@FUNCTIONS.register("quantize")
class QuantizeSpec(ModifySpec):
    """Simulate quantization to a narrow type, scaled by the largest magnitude. The gradient passes through."""

    fn: Literal["quantize"]
    to: Literal["int8", "int4", "float8_e4m3fn", "float8_e5m2"] = Field("int8", description="The simulated type.")
    straight_through: bool = Field(True, description="Pass the gradient through unchanged.")
    entrywise: ClassVar[bool] = True

    def change(self, tensor: Tensor, context: Context) -> Tensor:  # noqa: ARG002
        """Round to the values of the type. The largest finite magnitude is scaled to the largest value of the type.

        One symmetric scale for the complete tensor. Integer types round half to even.
        """
        import torch

        largest = torch.where(tensor.isfinite(), tensor.abs(), 0.0).amax() if tensor.numel() else tensor.new_zeros(())
        wide = torch.promote_types(tensor.dtype, torch.float32)
        bound = QUANTIZED_MAX[self.to]
        step = (largest.to(wide) / bound).clamp(min=torch.finfo(wide).tiny)
        scaled = tensor.to(wide) / step
        is_int = self.to.startswith("int")
        rounded = scaled.round().clamp(-bound, bound) if is_int else scaled.to(getattr(torch, self.to)).to(wide)
        return (rounded * step).to(tensor.dtype)


@FUNCTIONS.register("sign")
class SignSpec(ModifySpec):
    """Replace each value by its sign: -1, 0 or 1."""

    fn: Literal["sign"]
    entrywise: ClassVar[bool] = True

    def change(self, tensor: Tensor, context: Context) -> Tensor:  # noqa: ARG002
        """Return -1, 0 or 1 per element; of a complex element, its value divided by its magnitude. NaN stays NaN."""
        import torch

        return torch.where(tensor.isnan(), tensor, tensor.sgn())
