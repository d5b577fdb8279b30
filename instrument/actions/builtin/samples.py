"""Functions of `modify` along the samples of a batch, and the mean over dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, model_validator

from ...config.base import Misfit, dimension_misfits
from ...config.hook_specs import FUNCTIONS, ModifySpec
from ...fields.field_types import Dimension

if TYPE_CHECKING:
    from torch import Tensor

    from ..base import Context


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
