"""Scaling by a constant, by one factor per channel or by a schedule, and gradient reversal."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..stats.portable import constants
from .base import Context
from .builtin.scale import ScaleSpec

_EXACT = (torch.float32, torch.float64)  # dtypes in which products with numbers are computed


def scale_channels(tensor: Tensor, factors: Sequence[float], dim: int) -> Tensor:
    """Multiply each index of dimension `dim` by its factor. Shape and dtype are kept.

    The factors are copied to the device of the tensor once.

    Raises:
        ValueError: The tensor has no such dimension, or its size differs from the number of factors.
    """
    if not -tensor.dim() <= dim < tensor.dim() or tensor.shape[dim] != len(factors):
        raise ValueError(f"{len(factors)} factors do not fit dimension {dim} of shape {list(tensor.shape)}")
    shape = [1] * tensor.dim()
    shape[dim] = len(factors)
    wide = torch.promote_types(tensor.dtype, torch.float32)  # half precision would round the factors
    return (tensor * constants(tuple(factors), wide, tensor.device).view(shape)).to(tensor.dtype)


def scheduled(points: Mapping[int, float], step: int) -> float:
    """Interpolate linearly between points `{step: value}`. Constant before the first point and after the last."""
    steps = sorted(points)
    after = bisect_right(steps, step)
    if after == 0 or after == len(steps):
        return points[steps[max(0, after - 1)]]
    left, right = steps[after - 1], steps[after]
    return points[left] + (points[right] - points[left]) * (step - left) / (right - left)


class _Reverse(torch.autograd.Function):
    """The identity with a gradient that is multiplied by -factor (Ganin & Lempitsky 2015)."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        # The output of an autograd function must not be its input: it may be modified in place later.
        return tensor.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradients[0], None


class Scale:
    """The scale action of a spec."""

    def __init__(self, spec: ScaleSpec) -> None:
        self.spec = spec
        # The latest factor as a number and as a tensor; `instrument.control` may change it.
        self._constant = (math.nan, torch.zeros(()))

    @property
    def entrywise(self) -> bool:
        """Whether one factor applies to all elements."""
        return not isinstance(self.spec.factor, tuple)

    def prepare(self, tensors: Sequence[Tensor]) -> None:
        """Do nothing: each tensor is changed independently."""

    def __call__(self, tensor: Tensor, context: Context) -> tuple[Tensor, float | None]:
        factor, (known, constant) = self.spec.factor, self._constant
        # As a tensor: the product and its gradient have the same bits, and take half the time.
        if known is factor and type(tensor) is Tensor and tensor.is_cpu and tensor.dtype is constant.dtype:
            return tensor * constant, known
        if isinstance(factor, tuple):
            return scale_channels(tensor, factor, self.spec.dim), None
        number = scheduled(factor, context.step) if isinstance(factor, Mapping) else factor
        if self.spec.reverse:
            return _Reverse.apply(tensor, number), -number
        if factor is number and type(tensor) is Tensor and tensor.is_cpu and tensor.dtype in _EXACT:
            with torch.inference_mode(False):
                constant = torch.tensor(factor, dtype=tensor.dtype, device="cpu")
            self._constant = factor, constant
            return tensor * constant, number
        return tensor * number, number
