"""Statistics of a tensor on the CPU in one pass over its memory, by `native.c`.

Sums are computed in double precision. A second pass, with the mean subtracted first, is only required if the mean is so
far from zero that the variance loses precision.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from ..spec.statistics import VALUE_STATISTICS
from .formulas import FORMULAS, Sums

try:
    from . import native
# Installed without a C compiler: `instrument.stats.blocks` measures all tensors.
except ImportError:
    native = None  # type: ignore[assignment]

KERNEL = "portable" if native is None else "native"
"""The kernel that measures CPU tensors, for run.json."""

NATIVE = ("numel", "mean", "std", "rms", "min", "max", "abs_max", "l1", "l2", "zero_fraction", "nan_count", "inf_count")
"""The statistics that `native.c` computes, in its order. Others are computed from sums by `FORMULAS`."""
assert VALUE_STATISTICS[: len(NATIVE)] == NATIVE, "new statistics come after those of the native kernel"
_OTHERS = VALUE_STATISTICS[len(NATIVE) :]

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2}

# PyTorch describes its tensors to C code by DLPack's exchange API since version 2.10. Without it, `record_plain` is false.
_exchange_api = getattr(Tensor, "__dlpack_c_exchange_api__", None)
_connected = native is not None and _exchange_api is not None and native.connect(Tensor, Parameter, _exchange_api)

Row = tuple[float | None, ...]
"""All statistics of values, in the order of `instrument.spec.statistics.VALUE_STATISTICS`."""


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
    row: Row | None = native.statistics(address, numel, kind, wanted(NATIVE if with_l1 else _WITHOUT_L1))
    if row is None or not _OTHERS:
        return row
    n, nan, inf, zeros, low, high, _, squares, l1 = native.moments(address, numel, kind, 0.0, with_l1)
    if not n:
        return (*row, *(None for _ in _OTHERS))
    mean, std = (float(row[NATIVE.index(name)] or 0.0) for name in ("mean", "std"))
    sums = Sums(numel, n, nan, inf, zeros, low, high, mean, std * std, squares, l1, 1.0)
    return (*row, *(FORMULAS[name](sums) for name in _OTHERS))


@cache
def wanted(names: tuple[str, ...]) -> int:
    """Return statistics of `NATIVE` as bits, for `native.c`."""
    return sum(1 << NATIVE.index(name) for name in names)


_WITHOUT_L1 = tuple(name for name in NATIVE if name != "l1")


def _unsupported(*arguments: object) -> None:
    """Replace a function of the native kernel if the kernel or PyTorch's exchange API is missing."""


record_plain: Callable[[Tensor, int], bytes | None] = native.record if _connected else _unsupported
"""Compute the statistics of a plain tensor, the fastest way for a small one.

Plain tensors are those of class `Tensor` or `Parameter` on the CPU with dtype float32, bfloat16 or float64, at least two
elements, and elements in a contiguous block in any order of the dimensions.

Args:
    tensor: Any tensor.
    bits: The statistics: the result of `wanted`.

Returns:
    The memory of a float64 array [len(NATIVE)], with NaN for no value. None if the tensor is not plain, or if the kernel or
    PyTorch's exchange API is missing; use `instrument.stats.measure.measure` then.
"""

effect_of_plain: Callable[[Tensor, Tensor], list[float] | None] = native.effect if _connected else _unsupported
"""Compare two plain tensors of the same shape, dtype and strides; see `record_plain`.

Returns:
    The number of elements that differ, where two NaN are equal, and the L2 norms of both over their finite elements (NaN
    without any). None if the tensors are not supported.
"""

effect_of_clip: Callable[[Tensor, float | None, float | None], tuple[bool, list[float]] | None] = (
    native.effect_of_clip if _connected else _unsupported
)
"""Compare a plain tensor with its elements clamped to [low, high]; see `record_plain`.

Args:
    tensor: Any tensor.
    low: The lower bound, for bfloat16 a number of this dtype; None for no bound.
    high: The upper bound, likewise.

Returns:
    Whether all elements are finite and none equals a bound in the tensor's dtype, and the result of `effect_of_plain` for
    both tensors. None if the tensor is not supported, or if low exceeds high.
"""


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
