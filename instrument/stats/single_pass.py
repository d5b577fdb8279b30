"""Statistics of a tensor on the CPU in one pass over its memory, by `native.c`.

Sums are computed in double precision. A second pass, with the mean subtracted first, is only required if the mean is so
far from zero that the variance loses precision.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..spec.statistics import VALUE_STATISTICS
from .formulas import FORMULAS, Sums

try:
    from . import native
# Installed without a C compiler: `instrument.stats.blocks` measures all tensors.
except ImportError:
    native = None  # type: ignore[assignment]

KERNEL = "portable" if native is None else "native"
"""The kernel that measures CPU tensors, for run.json."""

# The limit of squared mean over variance up to which the variance is computed as the difference of two sums.
CANCELLATION = 1e6
SMALLEST, LARGEST = (
    1e-140,
    1e140,
)  # the largest magnitude of a float64 tensor whose squares a double adds up without loss

Row = tuple[float | None, ...]
"""All statistics of values, in the order of `instrument.spec.statistics.VALUE_STATISTICS`."""

# The order of the values that are computed without `FORMULAS`, since this function runs at every firing of a hook.
_ORDER = ("numel", "mean", "std", "rms", "min", "max", "abs_max", "l1", "l2", "zero_fraction", "nan_count", "inf_count")
assert VALUE_STATISTICS[: len(_ORDER)] == _ORDER, "new statistics come after those of the native kernel"
_OTHERS = VALUE_STATISTICS[len(_ORDER) :]
_NOTHING = (None,) * (len(_ORDER) - 3)  # no value is finite

_FLOAT64 = 2
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float64: _FLOAT64}


def measure_in_one_pass(tensor: Tensor, with_l1: bool) -> Row | None:
    """Compute statistics of a CPU tensor whose elements are a contiguous block in any order.

    Args:
        tensor: Any shape and dtype.
        with_l1: Whether l1 is requested. It requires a second read of each chunk.

    Returns:
        All statistics in their order; l1 is only valid if requested. None if the kernel is missing, does not support
        the dtype, or squares overflow or underflow.
    """
    kind = _KINDS.get(tensor.dtype)
    if native is None or kind is None:
        return None
    address, numel = tensor.data_ptr(), tensor.numel()
    n, nan, inf, zeros, low, high, total, squares, l1 = native.moments(address, numel, kind, 0.0, with_l1)
    if not n:
        return (numel, *_NOTHING, nan, inf, *(None for _ in _OTHERS))
    largest = max(-low, high)
    if kind == _FLOAT64 and not (SMALLEST <= largest <= LARGEST or largest == 0.0):
        return None
    mean = total / n
    spread = squares - total * mean
    if low == high:
        mean, spread = low, 0.0
    elif mean * total > CANCELLATION * spread:
        *_, moved, spread, _ = native.moments(address, numel, kind, mean, False)
        mean += moved / n
        spread -= moved * moved / n
    std = math.sqrt(spread / n) if spread > 0.0 else 0.0
    rms, l2 = math.sqrt(squares / n), math.sqrt(squares)
    row = (numel, mean, std, rms, low, high, largest, l1, l2, zeros / n, nan, inf)
    if not _OTHERS:
        return row
    variance = max(spread / n, 0.0)
    sums = Sums(numel, n, nan, inf, zeros, low, high, mean, variance, squares, l1, 1.0)
    return (*row, *(FORMULAS[name](sums) for name in _OTHERS))


def add_to_bins(vector: Tensor, low: float, high: float, counts: np.ndarray[Any, np.dtype[np.int64]]) -> bool:
    """Count the elements of a CPU vector between `low` and `high` in equal-width bins.

    Args:
        vector: Shape [elements], contiguous.
        low: The lower end of the first bin.
        high: The upper end of the last bin.
        counts: Shape [bins], contiguous. The counts are added to it.

    Returns:
        Whether the elements were counted. False if the kernel is missing or does not support the dtype.
    """
    kind = _KINDS.get(vector.dtype)
    if native is None or kind is None:
        return False
    native.histogram(vector.data_ptr(), vector.numel(), kind, low, high, len(counts), counts.ctypes.data)
    return True
