"""The built-in functions of modify, as pure functions: a tensor in, a new one of the same shape and dtype out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

QUANTIZED_MAX = {"int4": 7.0, "int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def zero(tensor: Tensor) -> Tensor:
    """Zeros, NaN included; still in the graph, with a gradient of zero."""
    return tensor.masked_fill(torch.ones((), dtype=torch.bool, device=tensor.device), 0.0)


def noise(tensor: Tensor, std: float, mean: float, generator: torch.Generator) -> Tensor:
    """The tensor plus independent Gaussian noise; the gradient passes through."""
    drawn = torch.randn(tensor.shape, generator=generator, device=tensor.device, dtype=tensor.dtype)
    return tensor + (drawn * std + mean)


def mean(tensor: Tensor, dim: tuple[int, ...] | int | None) -> Tensor:
    """Each value replaced by the mean over `dim` (None: over all), which keeps the tensor's shape."""
    if tensor.dim() == 0:
        return tensor.clone()
    dims = tuple(range(tensor.dim())) if dim is None else dim
    return tensor.mean(dims, keepdim=True).expand_as(tensor).clone()


def resample(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Each sample (dimension 0) replaced by one that is drawn from the batch, with replacement."""
    if tensor.dim() == 0:
        return tensor.clone()
    chosen = torch.randint(len(tensor), (len(tensor),), generator=generator, device=tensor.device)
    return tensor.index_select(0, chosen)


def shuffle(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """The samples (dimension 0) in a random order."""
    if tensor.dim() == 0:
        return tensor.clone()
    return tensor.index_select(0, torch.randperm(len(tensor), generator=generator, device=tensor.device))


def dropout(tensor: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """Each element zero with probability p, the others times 1 / (1 - p)."""
    kept = torch.rand(tensor.shape, generator=generator, device=tensor.device) >= p
    return torch.where(kept, tensor / (1.0 - p), torch.zeros((), dtype=tensor.dtype, device=tensor.device))


def quantize(tensor: Tensor, to: str) -> Tensor:
    """The nearest values that a narrow type can hold, when the largest magnitude is scaled to the type's largest.

    One scale for the whole tensor, symmetric; int types round half to even. Finite values only decide the scale.
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
    """-1, 0 or 1; NaN stays NaN."""
    return torch.where(tensor.isnan(), tensor, tensor.sign())


def put(tensor: Tensor, value: float, count: int, generator: torch.Generator) -> Tensor:
    """The tensor with `value` at `count` places, drawn without replacement (all of them where there are fewer)."""
    places = torch.randperm(tensor.numel(), generator=generator, device=tensor.device)[:count]
    mask = torch.zeros(tensor.numel(), dtype=torch.bool, device=tensor.device)
    mask[places] = True
    return tensor.masked_fill(mask.view(tensor.shape), value)


def l1(gradient: Tensor, value: Tensor, coefficient: float) -> Tensor:
    """The gradient of loss + coefficient * sum(|value|)."""
    return gradient.add(value.sign().to(gradient.dtype), alpha=coefficient)


def l2(gradient: Tensor, value: Tensor, coefficient: float) -> Tensor:
    """The gradient of loss + coefficient / 2 * sum(value^2): what optimizers call weight decay, in the very operation."""
    return gradient.add(value.to(gradient.dtype), alpha=coefficient)


def penalise(loss: Tensor, parameters: Sequence[Tensor], coefficient: float, norm: Literal["l1", "l2"]) -> Tensor:
    """loss + coefficient * sum(|p|) for l1, loss + coefficient / 2 * sum(p^2) for l2, over all parameters."""
    for parameter in parameters:
        loss = loss + (
            coefficient * parameter.abs().sum() if norm == "l1" else coefficient / 2 * parameter.square().sum()
        )
    return loss


def patch(tensor: Tensor, recorded: Tensor, part: Sequence[slice | int] | None) -> Tensor:
    """The tensor with a recorded one in the place of a part of it, or of all of it; no gradient flows through the part.

    Raises:
        ValueError: The recorded one has another shape than the tensor, and than the part.
    """
    where = torch.zeros(tensor.shape, dtype=torch.bool, device=tensor.device)
    index = (...,) if part is None else tuple(part)
    where[index] = True
    if recorded.shape != tensor.shape:
        if recorded.shape != where[index].shape:
            raise ValueError(f"the recorded tensor is {list(recorded.shape)}, here are {list(tensor.shape)}")
        whole = torch.zeros_like(tensor)
        whole[index] = recorded.to(tensor.device, tensor.dtype)
        recorded = whole
    return torch.where(where, recorded.to(tensor.device, tensor.dtype), tensor)


def straight_through(old: Tensor, new: Tensor) -> Tensor:
    """The new value, with the gradient of the old one (Bengio, Léonard & Courville 2013)."""
    return _StraightThrough.apply(old, new)  # type: ignore[no-any-return]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, old: Tensor, new: Tensor) -> Tensor:  # noqa: ARG004
        return new.detach().clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradients[0], None
