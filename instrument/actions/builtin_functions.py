"""The built-in functions of `modify`. Each takes a tensor and returns a new one with the same shape and dtype."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Literal

import torch
from torch import Tensor

from ..nested import to_device
from .tensor_selection import TensorSelection

QUANTIZED_MAX = {"int4": 7.0, "int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def zero(tensor: Tensor) -> Tensor:
    """Return zeros, also for NaN. The result stays in the graph with a gradient of zero."""
    return tensor.masked_fill(torch.ones((), dtype=torch.bool, device=tensor.device), 0.0)


def add(tensor: Tensor, value: Tensor | float) -> Tensor:
    """Add a number, or a tensor that broadcasts to the shape. The gradient passes through."""
    return tensor + value


def project(tensor: Tensor, basis: Tensor, dim: int, *, out: bool) -> Tensor:
    """Project the vectors along a dimension onto a subspace through the origin, or remove that part.

    Args:
        tensor: Any floating-point dtype and shape.
        basis: Orthonormal directions, [directions, units], in float32 or the wider dtype of the tensor.
        dim: The dimension of the units.
        out: Whether to remove the part in the subspace, instead of everything else.

    Returns:
        The projected tensor, same shape and dtype.
    """
    vectors, device = tensor.movedim(dim, -1).to(basis.dtype), tensor.device.type
    # Autocast would multiply in half precision.
    with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
        part = vectors @ basis.T @ basis
    return (vectors - part if out else part).movedim(-1, dim).to(tensor.dtype)


def swap(tensor: Tensor) -> Tensor:
    """Exchange the first half of the samples (dimension 0) with the second one. Gradients follow their values.

    Raises:
        ValueError: The number of samples is odd.
    """
    if tensor.dim() == 0 or len(tensor) % 2:
        raise ValueError(f"swap requires an even number of samples, not shape {list(tensor.shape)}")
    return tensor.roll(len(tensor) // 2, 0)


def repeat_sample(tensor: Tensor, index: int) -> Tensor:
    """Return the values of one sample (dimension 0) in place of each sample, as a view. Gradients flow to that sample.

    Raises:
        IndexError: There is no such sample.
    """
    return tensor[range(len(tensor))[index]].expand_as(tensor)


def noise(tensor: Tensor, std: float, mean: float, generator: torch.Generator) -> Tensor:
    """Add independent Gaussian noise. The gradient passes through."""
    drawn = torch.randn(tensor.shape, generator=generator, device=tensor.device, dtype=tensor.dtype)
    return tensor + (drawn * std + mean)


def mean(tensor: Tensor, dim: tuple[int, ...] | int | None) -> Tensor:
    """Replace each value by the mean over `dim` (None: over all dimensions). The shape is kept."""
    if tensor.dim() == 0:
        return tensor.clone()
    dims = tuple(range(tensor.dim())) if dim is None else dim
    return tensor.mean(dims, keepdim=True).expand_as(tensor).clone()


def resample(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Replace each sample (dimension 0) by one drawn from the batch with replacement."""
    if tensor.dim() == 0 or not len(tensor):
        return tensor.clone()
    chosen = torch.randint(len(tensor), (len(tensor),), generator=generator, device=tensor.device)
    return tensor.index_select(0, chosen)


def shuffle(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Permute the samples (dimension 0) randomly."""
    if tensor.dim() == 0:
        return tensor.clone()
    return tensor.index_select(0, torch.randperm(len(tensor), generator=generator, device=tensor.device))


def dropout(tensor: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """Set each element to zero with probability `p` and multiply the others by 1 / (1 - p)."""
    kept = torch.rand(tensor.shape, generator=generator, device=tensor.device) >= p
    return torch.where(kept, tensor / (1.0 - p), torch.zeros((), dtype=tensor.dtype, device=tensor.device))


def quantize(tensor: Tensor, to: str) -> Tensor:
    """Round to the values of a narrow type. The largest magnitude is scaled to the largest value of the type.

    One symmetric scale for the complete tensor, computed from its finite values. Integer types round half to even.

    Args:
        tensor: Any floating-point dtype and shape.
        to: A key of `QUANTIZED_MAX`.

    Returns:
        The rounded values in the dtype of the tensor.
    """
    largest = torch.where(tensor.isfinite(), tensor.abs(), 0.0).amax() if tensor.numel() else tensor.new_zeros(())
    wide = torch.promote_types(tensor.dtype, torch.float32)
    step = (largest.to(wide) / QUANTIZED_MAX[to]).clamp(min=torch.finfo(wide).tiny)
    scaled = tensor.to(wide) / step
    largest_int = QUANTIZED_MAX[to]
    is_int = to.startswith("int")
    rounded = scaled.round().clamp(-largest_int, largest_int) if is_int else scaled.to(getattr(torch, to)).to(wide)
    return (rounded * step).to(tensor.dtype)


def sign(tensor: Tensor) -> Tensor:
    """Return -1, 0 or 1 per element; of a complex element, its value divided by its magnitude. NaN stays NaN."""
    return torch.where(tensor.isnan(), tensor, tensor.sgn())


def insert_value(tensor: Tensor, value: float, count: int, generator: torch.Generator) -> Tensor:
    """Set `count` elements, drawn without replacement, to `value`. All elements if there are fewer."""
    indices = torch.randperm(tensor.numel(), generator=generator, device=tensor.device)[:count]
    mask = torch.zeros(tensor.numel(), dtype=torch.bool, device=tensor.device)
    mask.index_fill_(0, indices, True)  # `mask[indices] = True` copies a number from the host and waits
    return tensor.masked_fill(mask.view(tensor.shape), value)


def l1(gradient: Tensor, value: Tensor, coefficient: float) -> Tensor:
    """Return the gradient of loss + coefficient * sum(|value|)."""
    return gradient.add(value.sgn().to(gradient.dtype), alpha=coefficient)


def l2(gradient: Tensor, value: Tensor, coefficient: float) -> Tensor:
    """Return the gradient of loss + coefficient / 2 * sum(value^2).

    Bit-identical to the weight decay of PyTorch optimizers.
    """
    return gradient.add(value.to(gradient.dtype), alpha=coefficient)


def add_penalty(loss: Tensor, parameters: Sequence[Tensor], coefficient: float, norm: Literal["l1", "l2"]) -> Tensor:
    """Return loss + coefficient * sum(|p|) for l1, or loss + coefficient / 2 * sum(p^2) for l2, over all parameters."""
    for parameter in parameters:
        loss = loss + (
            coefficient * parameter.abs().sum() if norm == "l1" else coefficient / 2 * parameter.square().sum()
        )
    return loss


def patch(tensor: Tensor, recorded: Tensor, selection: TensorSelection | None = None) -> Tensor:
    """Replace a tensor by a recorded one. No gradient flows through it.

    Args:
        tensor: The tensor: complete, or the selected part.
        recorded: The recorded values, in CPU memory, with the shape of the tensor or of the complete tensor.
        selection: The part of the complete tensor; None if the tensor is complete.

    Raises:
        ValueError: The recorded tensor has neither of these shapes.
    """
    new = to_device(recorded, tensor.device).to(tensor.dtype)
    if selection is not None and new.shape == selection.shape:
        new = selection.of(new)
    if new.shape != tensor.shape:
        raise ValueError(
            f"the recorded tensor has shape {list(recorded.shape)}, the tensor to replace {list(tensor.shape)}"
        )
    return torch.where(torch.ones((), dtype=torch.bool, device=tensor.device), new, tensor)


def straight_through(old: Tensor, new: Tensor) -> Tensor:
    """Return the new value with the gradient of the old one (Bengio, Léonard & Courville 2013)."""
    return _StraightThrough.apply(old, new)  # type: ignore[no-any-return]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, old: Tensor, new: Tensor) -> Tensor:  # noqa: ARG004
        return new.detach().clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradients[0], None
