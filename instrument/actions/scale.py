"""Scale: multiply by a number, by one for each channel, by one that changes over the steps; or reverse the gradient."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..spec.interventions import ScaleSpec
from .base import Context


def scale(tensor: Tensor, factor: float) -> Tensor:
    """The tensor times `factor`: same shape, same dtype."""
    return tensor * factor


def scale_channels(tensor: Tensor, factors: Sequence[float], dim: int) -> Tensor:
    """Each index of dimension `dim` times its factor, same shape and dtype.

    Raises:
        ValueError: The tensor has no such dimension, or it is of another size.
    """
    if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] != len(factors):
        raise ValueError(f"{len(factors)} factors do not run along dimension {dim} of shape {list(tensor.shape)}")
    shape = [1] * tensor.dim()
    shape[dim] = len(factors)
    wide = torch.promote_types(tensor.dtype, torch.float32)  # a factor is not rounded to half precision
    return (tensor * torch.tensor(factors, dtype=wide, device=tensor.device).view(shape)).to(tensor.dtype)


def scheduled(points: Mapping[int, float], step: int) -> float:
    """The number at a step: linear between the points, level before the first and behind the last."""
    steps = sorted(points)
    after = bisect_right(steps, step)
    if after == 0 or after == len(steps):
        return points[steps[max(0, after - 1)]]
    left, right = steps[after - 1], steps[after]
    return points[left] + (points[right] - points[left]) * (step - left) / (right - left)


class _Reverse(torch.autograd.Function):
    """The value as it is; its gradient times -factor."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.clone()  # a function's output must not be its input where it may be written to in place later

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradients[0], None


def reverse_gradient(tensor: Tensor, factor: float) -> Tensor:
    """The tensor; what flows back through it is multiplied by -factor (Ganin & Lempitsky 2015)."""
    return _Reverse.apply(tensor, factor)  # type: ignore[no-any-return]


class Scale:
    """The scaling that a spec asks for."""

    def __init__(self, spec: ScaleSpec) -> None:
        self.spec = spec

    @property
    def entrywise(self) -> bool:
        """One number for all."""
        return not isinstance(self.spec.factor, tuple)

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Nothing: each tensor is changed for itself."""

    def __call__(self, tensor: Tensor, context: Context) -> tuple[Tensor, float | None]:
        factor = self.spec.factor
        if isinstance(factor, tuple):
            return scale_channels(tensor, factor, self.spec.dim), None
        number = scheduled(factor, context.step) if isinstance(factor, Mapping) else factor
        if self.spec.reverse:
            return reverse_gradient(tensor, number), -number
        return scale(tensor, number), number
