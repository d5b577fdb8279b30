"""Rounding to a narrower dtype in a given direction. The default rounding, to the nearest number, may exceed a bound."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def round_down(bound: float, dtype: torch.dtype) -> float:
    """Return the largest number of a floating-point dtype that is not above a finite bound; minus infinity if no number is.

    Comparing or clamping a tensor of this dtype with the result is equivalent to using the bound.
    """
    info = torch.finfo(dtype)
    if dtype == torch.float64:
        return bound
    if abs(bound) > info.max:
        return info.max if bound > 0 else -math.inf
    spacing = max(math.ldexp(info.eps, math.frexp(bound)[1] - 1), info.smallest_normal * info.eps)
    return math.floor(bound / spacing) * spacing


def round_up(bound: float, dtype: torch.dtype) -> float:
    """Return the smallest number of a floating-point dtype that is not below a bound; see `round_down`."""
    return 0.0 - round_down(-bound, dtype)  # not -0.0 for a bound of zero


def toward_zero(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert float32 values to float16 or bfloat16 without increasing any magnitude. The gradient passes through.

    Values that have the dtype already are returned.
    """
    narrow = values.to(dtype)
    if dtype == values.dtype:
        return narrow
    excess = narrow.detach().to(values.dtype).abs() > values.detach().abs()
    # In sign-magnitude representation, decrementing the bits gives the next smaller magnitude.
    before = (narrow.detach().view(torch.int16) - 1).view(dtype)
    return narrow - torch.where(excess, narrow.detach() - before, 0.0)
