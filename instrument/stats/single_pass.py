"""Statistics of a flat tensor on the CPU in one pass over its memory, by `native.c`.

Sums are formed in double, so that a mean far from zero costs the variance nothing that float32 would notice; beyond that
a second pass is made, with the mean taken away first.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor

try:
    from . import native
except ImportError:  # installed where there was no C compiler: instrument.stats.blocks does it all
    native = None  # type: ignore[assignment]

CANCELLATION = 1e6  # squared mean over variance, up to which the variance is a difference of two sums
SMALLEST, LARGEST = (
    1e-140,
    1e140,
)  # the largest magnitude of a float64 tensor whose squares a double adds up without loss

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}


def measure_in_one_pass(flat: Tensor, names: Collection[str]) -> dict[str, float | None] | None:
    """Statistics of a flat CPU tensor.

    Args:
        flat: Any dtype, shape [elements].
        names: What is asked for.

    Returns:
        All statistics, of which l1 is right only where it was asked for; None where this is not the way: the type is
        another one, squares overflow or vanish, or there is no compiled kernel.
    """
    if flat.dtype == torch.float16:
        flat = flat.to(torch.float32)
    kind = _KINDS.get(flat.dtype)
    if native is None or kind is None:
        return None
    flat = flat.contiguous()
    address, numel = flat.data_ptr(), flat.numel()
    n, nan, inf, zeros, low, high, total, squares, l1 = native.moments(address, numel, kind, 0.0, "l1" in names)
    if not n:
        return {**_NOTHING, "numel": numel, "nan_count": nan, "inf_count": inf}
    largest = max(-low, high)
    if kind == 2 and not (SMALLEST <= largest <= LARGEST or largest == 0.0):
        return None
    mean = total / n
    spread = squares - total * mean
    if low == high:
        mean, spread = low, 0.0
    elif mean * total > CANCELLATION * spread:
        *_, moved, spread, _ = native.moments(address, numel, kind, mean, False)
        mean += moved / n
        spread -= moved * moved / n
    l2 = math.sqrt(squares)
    return {
        "numel": numel,
        "mean": mean,
        "std": math.sqrt(max(spread, 0.0) / n),
        "rms": math.sqrt(squares / n),
        "min": low,
        "max": high,
        "abs_max": largest,
        "l1": l1,
        "l2": l2,
        "zero_fraction": zeros / n,
        "nan_count": nan,
        "inf_count": inf,
    }


_NOTHING: dict[str, float | None] = dict.fromkeys(
    ("mean", "std", "rms", "min", "max", "abs_max", "l1", "l2", "zero_fraction")
)
