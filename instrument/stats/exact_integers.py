"""Extremes of 64-bit integers, which the float64 columns round beyond 2^53."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..spec.statistics import REMAINDERS
from .flatten import stored_elements
from .measure import Measured

EXACT_UP_TO = 2**53
_DTYPES = (torch.int64, torch.uint64)


def remainders(tensor: Tensor, names: Sequence[str], measured: Measured) -> dict[str, float]:
    """Return the differences between the exact integers and the rounded statistics of a tensor.

    Args:
        tensor: Any tensor.
        names: The names of its statistics.
        measured: Its sums.

    Returns:
        The remainders that are not zero, at most 1024 in magnitude, by their names. Empty for tensors on a device.
    """
    if tensor.dtype not in _DTYPES or measured.on_device is not None:
        return {}
    requested = [name for name in names if name in REMAINDERS]
    rounded = {
        name: int(value)
        for name, value in zip(requested, measured.statistics(requested), strict=True)
        if value is not None and abs(value) >= EXACT_UP_TO
    }
    if not rounded:
        return {}
    numbers = stored_elements(tensor)[0].numpy()
    low, high = int(numbers.min()), int(numbers.max())
    exact = {"min": low, "max": high, "abs_max": max(abs(low), abs(high))}
    return {REMAINDERS[name]: float(exact[name] - value) for name, value in rounded.items() if exact[name] != value}
