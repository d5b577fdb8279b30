"""Numbers of a narrower type that lie on the right side of a bound, which rounding to the nearest does not promise."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def round_down(bound: float, dtype: torch.dtype) -> float:
    """The largest number of a floating type that is not above a bound.

    A tensor of the type may be compared with it, or clamped to it, as if it were the bound itself.

    Args:
        bound: Any finite number.
        dtype: float16, bfloat16, float32 or float64.

    Returns:
        The number; minus infinity where the bound lies below all finite ones.
    """
    info = torch.finfo(dtype)
    if dtype == torch.float64:
        return bound
    if abs(bound) > info.max:
        return info.max if bound > 0 else -math.inf
    spacing = max(math.ldexp(info.eps, math.frexp(bound)[1] - 1), info.smallest_normal * info.eps)
    return math.floor(bound / spacing) * spacing


def round_up(bound: float, dtype: torch.dtype) -> float:
    """The smallest number of a floating type that is not below a bound; see `round_down`."""
    return -round_down(-bound, dtype)


def toward_zero(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Values in a narrower type, none of larger magnitude than before; the gradient passes through.

    Args:
        values: Any shape; float32, or of the type itself.
        dtype: float16, bfloat16, or the type of the values.
    """
    narrow = values.to(dtype)
    if dtype == values.dtype:
        return narrow
    excess = narrow.detach().to(values.dtype).abs() > values.detach().abs()
    # Sign and magnitude: the number before it in magnitude has the bits before it.
    before = (narrow.detach().view(torch.int16) - 1).view(dtype)
    return narrow - torch.where(excess, narrow.detach() - before, 0.0)
