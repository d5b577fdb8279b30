"""Statistics of a flat tensor on the CPU, computed block by block.

A block fits the L2 cache. Floats of up to 32 bits are summed in their own precision, in a few vectorized passes:
minimum and maximum, zeros, sum, and sum of squares. PyTorch sums in a tree, so the rounding error stays near 1e-7 of
the sum of magnitudes. A block is centered and summed in float64 if this is not exact enough (the mean is far from zero
compared with the spread), if squares overflow or underflow, and for all other dtypes. The moments of the blocks are
merged (Chan, Golub & LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances").
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..spec.statistics import VALUE_STATISTICS
from .formulas import FORMULAS, Sums

BLOCK = 65_536  # in elements; half a megabyte in float64, which fits the L2 cache
SAFE_EXPONENT = 400  # a power of two; sums of squares up to it neither overflow nor underflow float64
MAX_EXPONENT = 1000  # a power of two; the divisor and its inverse are then finite
SMALLEST, LARGEST = 1e-12, 1e16  # range of a block's maximum magnitude for which float32 sums squares without loss
# The limit of squared mean over variance up to which the variance is computed as the difference of two sums.
CANCELLATION = 4.0


@dataclass(slots=True)
class Moments:
    """The moments of all blocks so far, in multiples of `unit`.

    `mean` is relative to `pivot`, the first value, so that equal values have a spread of exactly zero. `squares` and
    `l1` refer to the values themselves.
    """

    unit: float = 1.0
    n: int = 0
    nan_count: int = 0
    inf_count: int = 0
    zeros: int = 0
    low: float = math.inf
    high: float = -math.inf
    pivot: float = 0.0
    mean: float = 0.0
    m2: float = 0.0
    squares: float = 0.0
    l1: float = 0.0

    def merge(self, size: int, mean: float, m2: float) -> None:
        """Add a block of `size` values, given its mean relative to the pivot and its sum of squared deviations."""
        delta, total = mean - self.mean, self.n + size
        self.mean += delta * size / total
        self.m2 += m2 + delta * delta * self.n * size / total
        self.n = total


class Scratch(threading.local):
    """Memory for one block, reused between calls. Each thread has its own."""

    def __init__(self) -> None:
        with torch.inference_mode(False):
            self.values = torch.empty(BLOCK, dtype=torch.float32)
            self.squares = torch.empty(BLOCK, dtype=torch.float32)
        self.mask = np.empty(BLOCK, dtype=bool)


_SCRATCH = Scratch()


def measure_blocks(flat: Tensor, names: Collection[str]) -> dict[str, float | None]:
    """Compute statistics of a flat CPU tensor.

    Args:
        flat: Any real dtype, shape [elements].
        names: The requested statistics. Those that require an additional pass are only computed if requested.

    Returns:
        All statistics. Those that were not requested may be 0.
    """
    narrow = flat.is_floating_point() and flat.dtype != torch.float64
    moments = Moments() if narrow else Moments(_unit(flat) if flat.dtype == torch.float64 else 1.0)
    for start in range(0, flat.numel(), BLOCK):
        block = flat[start : start + BLOCK]
        if not (narrow and _add_unconverted(moments, block, names)):
            _add_centered(moments, block.to(torch.float64), with_l1="l1" in names)
    return _statistics(moments, flat.numel())


def _add_unconverted(moments: Moments, block: Tensor, names: Collection[str]) -> bool:
    """Add a block of floats of up to 32 bits in its own precision.

    If that is not exact enough, return False and add nothing.
    """
    size = block.numel()
    if block.dtype != torch.float32:
        block = _SCRATCH.values[:size].copy_(block)
    low, high = (bound.item() for bound in torch.aminmax(block))
    largest = max(-low, high)
    if not (SMALLEST <= largest <= LARGEST or largest == 0.0):  # also rejects values that are not finite
        return False
    total, squares = 0.0, 0.0
    buffer = _SCRATCH.squares[:size]
    if largest:
        total = block.sum().item()
        squares = torch.mul(block, block, out=buffer).sum().item()
        mean = total / size
        m2 = squares - total * mean
        if mean * mean * size > CANCELLATION * m2:
            return False
    if moments.n == 0:
        moments.pivot = low
    moments.low, moments.high = min(moments.low, low), max(moments.high, high)
    moments.squares += squares
    if "zero_fraction" in names:
        mask = _SCRATCH.mask[:size]
        moments.zeros += int(np.count_nonzero(np.equal(block.numpy(), 0.0, out=mask)))
    if "l1" in names:
        moments.l1 += torch.abs(block, out=buffer).sum().item()
    moments.merge(size, total / size - moments.pivot, max(squares - total * total / size, 0.0))
    return True


def _add_centered(moments: Moments, block: Tensor, *, with_l1: bool) -> None:
    """Add a block in float64, in two passes: the mean, then the deviations from it."""
    smallest, largest = (bound.item() for bound in torch.aminmax(block))
    if not (math.isfinite(smallest) and math.isfinite(largest)):
        moments.nan_count += int(block.isnan().sum())
        moments.inf_count += int(block.isinf().sum())
        block = block[block.isfinite()]
        if not block.numel():
            return
        smallest, largest = (bound.item() for bound in torch.aminmax(block))
    size = block.numel()
    moments.low, moments.high = min(moments.low, smallest), max(moments.high, largest)
    moments.zeros += size - int(torch.count_nonzero(block))
    if moments.unit != 1.0:
        block = block / moments.unit
    moments.squares += torch.dot(block, block).item()
    if with_l1:
        moments.l1 += block.abs().sum().item()
    if moments.n == 0:
        moments.pivot = smallest / moments.unit
    shifted = block - moments.pivot
    mean = shifted.sum().item() / size
    centered = shifted.sub_(mean)
    drift = centered.sum().item()  # the rounding error of the mean
    moments.merge(size, mean, torch.dot(centered, centered).item() - drift * drift / size)


def _statistics(moments: Moments, numel: int) -> dict[str, float | None]:
    n = moments.n
    if n == 0:
        counts = {"numel": numel, "nan_count": moments.nan_count, "inf_count": moments.inf_count}
        return dict.fromkeys(VALUE_STATISTICS) | counts
    sums = Sums(
        numel=numel,
        n=n,
        nan_count=moments.nan_count,
        inf_count=moments.inf_count,
        zeros=moments.zeros,
        low=moments.low,
        high=moments.high,
        mean=moments.pivot + moments.mean,
        variance=max(moments.m2, 0.0) / n,
        squares=moments.squares,
        magnitudes=moments.l1,
        unit=moments.unit,
    )
    return {name: FORMULAS[name](sums) for name in VALUE_STATISTICS}


def _unit(flat: Tensor) -> float:
    """Return a power of two as the unit, so that squares of float64 neither overflow nor underflow.

    1 if no other unit is required.
    """
    finite = flat[flat.isfinite()]
    exponent = math.frexp(finite.abs().max().item())[1] if finite.numel() else 0
    return 1.0 if abs(exponent) <= SAFE_EXPONENT else 2.0 ** max(-MAX_EXPONENT, min(exponent, MAX_EXPONENT))
