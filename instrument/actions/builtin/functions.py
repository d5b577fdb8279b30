"""Functions of `modify` that need only the tensor: of each element, of random ones, and of the samples of a batch; and penalties."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from ...config.base import Misfit, dimension_misfits
from ...config.hook_specs import FUNCTIONS, ModifySpec
from ...fields.field_types import Count, Dimension, NonNegative, Number, number_to_text

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


Dimensions = Annotated[tuple[Dimension, ...], Field(min_length=1)]


@FUNCTIONS.register("swap")
class SwapSpec(ModifySpec):
    """Exchange the first half of the samples with the second one; with `samples: [0, 1]`, exchange these two."""

    fn: Literal["swap"]

    @model_validator(mode="after")
    def _validate_swap(self) -> SwapSpec:
        if self.definition.family != "module":
            raise ValueError(f"swap requires a batch, which the tensors of kind {self.kind} do not have")
        if self.slice is not None:
            raise ValueError("swap cannot be combined with 'slice'; use 'samples', 'positions', 'units' or 'heads'")
        return self

    def change(self, tensor: Tensor, context: Context) -> Tensor:  # noqa: ARG002
        """Exchange the halves. Gradients follow their values.

        Raises:
            ValueError: The number of samples is odd.
        """
        if tensor.dim() == 0 or len(tensor) % 2:
            raise ValueError(f"swap requires an even number of samples, not shape {list(tensor.shape)}")
        return tensor.roll(len(tensor) // 2, 0)

    def misfits(self, shape: Sequence[int], complete: Sequence[int]) -> Iterator[Misfit]:  # noqa: ARG002
        if not shape or shape[0] % 2:
            yield "fn", "swap requires an even number of samples in", "two or more samples in 'samples'"


@FUNCTIONS.register("mean")
class MeanSpec(ModifySpec):
    """Replace values by their mean over dimensions (mean ablation)."""

    fn: Literal["mean"]
    dim: Dimensions | Dimension | None = Field(
        0, description="The dimension or dimensions to average over; null averages over all."
    )

    def change(self, tensor: Tensor, context: Context) -> Tensor:  # noqa: ARG002
        if tensor.dim() == 0:
            return tensor.clone()
        dims = tuple(range(tensor.dim())) if self.dim is None else self.dim
        return tensor.mean(dims, keepdim=True).expand_as(tensor).clone()

    def misfits(self, shape: Sequence[int], complete: Sequence[int]) -> Iterator[Misfit]:  # noqa: ARG002
        if self.dim is not None:
            dims = [self.dim] if isinstance(self.dim, int) else self.dim
            yield from dimension_misfits("dim", dims, max(1, len(shape)))  # the mean of a scalar is the scalar


@FUNCTIONS.register("resample")
class ResampleSpec(ModifySpec):
    """Replace each sample's values by those of a random sample of the batch (resample ablation)."""

    fn: Literal["resample"]

    def change(self, tensor: Tensor, context: Context) -> Tensor:
        """Replace each sample (dimension 0) by one drawn with replacement."""
        import torch

        if tensor.dim() == 0 or not len(tensor):
            return tensor.clone()
        generator = context.generator(tensor.device)
        drawn = torch.randint(len(tensor), (len(tensor),), generator=generator, device=tensor.device)
        return tensor.index_select(0, drawn)


@FUNCTIONS.register("shuffle")
class ShuffleSpec(ModifySpec):
    """Shuffle the samples of the batch."""

    fn: Literal["shuffle"]

    def change(self, tensor: Tensor, context: Context) -> Tensor:
        import torch

        if tensor.dim() == 0:
            return tensor.clone()
        generator = context.generator(tensor.device)
        return tensor.index_select(0, torch.randperm(len(tensor), generator=generator, device=tensor.device))


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
