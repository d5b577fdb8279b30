"""Statistics of a tensor on the CPU in one pass over its memory, by `native.c`.

Sums are formed in double, so that a mean far from zero costs the variance nothing that float32 would notice; beyond that
a second pass is made, with the mean taken away first.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

try:
    from . import native
except ImportError:  # installed where there was no C compiler: instrument.stats.blocks does it all
    native = None  # type: ignore[assignment]

KERNEL = "portable" if native is None else "native"
"""Which kernel measures tensors on the CPU, for run.json."""

CANCELLATION = 1e6  # squared mean over variance, up to which the variance is a difference of two sums
SMALLEST, LARGEST = (
    1e-140,
    1e140,
)  # the largest magnitude of a float64 tensor whose squares a double adds up without loss

Row = tuple[float | None, ...]
"""All statistics of values, in the order of `instrument.spec.statistics.OF_VALUES`."""

_FLOAT64 = 2
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float64: _FLOAT64}


def measure_in_one_pass(tensor: Tensor, with_l1: bool) -> Row | None:
    """Statistics of a CPU tensor that lies in memory without gaps, in whatever order.

    Args:
        tensor: Any shape and dtype.
        with_l1: Whether l1 is asked for; it costs a second look at each piece of the tensor.

    Returns:
        All statistics, in their order, of which l1 is right only where it was asked for; None where this is not the
        way: the type is another one, squares overflow or vanish, or there is no compiled kernel.
    """
    kind = _KINDS.get(tensor.dtype)
    if native is None or kind is None:
        return None
    address, numel = tensor.data_ptr(), tensor.numel()
    n, nan, inf, zeros, low, high, total, squares, l1 = native.moments(address, numel, kind, 0.0, with_l1)
    if not n:
        return (numel, None, None, None, None, None, None, None, None, None, nan, inf)
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
    return (numel, mean, std, rms, low, high, largest, l1, l2, zeros / n, nan, inf)


def add_to_bins(vector: Tensor, low: float, high: float, counts: np.ndarray[Any, np.dtype[np.int64]]) -> bool:
    """Count a CPU vector's elements between low and high in equal bins.

    Args:
        vector: Shape [elements], contiguous.
        low: The lower end of the first bin.
        high: The upper end of the last.
        counts: Shape [bins], contiguous; they are added to.

    Returns:
        Whether that was done; not where the type is another one, or there is no compiled kernel.
    """
    kind = _KINDS.get(vector.dtype)
    if native is None or kind is None:
        return False
    native.histogram(vector.data_ptr(), vector.numel(), kind, low, high, len(counts), counts.ctypes.data)
    return True
