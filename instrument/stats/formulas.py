"""The formula of each statistic of a tensor's values, over the sums that every way of measuring provides.

`instrument.spec.statistics` defines the names. The ways of measuring (`single_pass` or `blocks` on the CPU,
`device_operations` or `device_kernel`, and `merge` for the parts of several processes) differ in how they form the sums. The numbers are
floats on the CPU and float64 tensors elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..spec.statistics import COUNTS

Number = Any
"""An int, a float, or a float64 tensor."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Sums over the n finite values x of a tensor, where y = x / unit.

    If n is 0, sums on a device are NaN; the CPU applies no formula then.

    Attributes:
        numel: The number of elements, including values that are not finite.
        n: The number of finite values.
        nan_count: The number of NaN.
        inf_count: The number of infinities.
        zeros: The number of zeros.
        low: The minimum of x.
        high: The maximum of x.
        mean: sum(y) / n.
        variance: sum((y - mean)^2) / n, at least 0.
        squares: sum(y^2).
        magnitudes: sum(|y|); only valid if `l1` is requested.
        unit: A power of two, or the largest magnitude. It prevents overflow and underflow of squares.
    """

    numel: Number
    n: Number
    nan_count: Number
    inf_count: Number
    zeros: Number
    low: Number
    high: Number
    mean: Number
    variance: Number
    squares: Number
    magnitudes: Number
    unit: Number


def _sqrt(x: Number) -> Number:
    return x.sqrt() if isinstance(x, Tensor) else math.sqrt(x)


def maximum(x: Number, y: Number) -> Number:
    """Return the greater of two numbers."""
    return torch.maximum(x, y) if isinstance(x, Tensor) else max(x, y)


FORMULAS: dict[str, Callable[[Sums], Number]] = {
    "numel": lambda s: s.numel,
    "mean": lambda s: s.mean * s.unit,
    "std": lambda s: _sqrt(s.variance) * s.unit,
    "rms": lambda s: _sqrt(s.squares / s.n) * s.unit,
    "min": lambda s: s.low,
    "max": lambda s: s.high,
    "abs_max": lambda s: maximum(abs(s.low), abs(s.high)),
    "l1": lambda s: s.magnitudes * s.unit,
    "l2": lambda s: _sqrt(s.squares) * s.unit,
    "zero_fraction": lambda s: s.zeros / s.n,
    "nan_count": lambda s: s.nan_count,
    "inf_count": lambda s: s.inf_count,
}
"""The formulas by name. Each statistic of `instrument.spec.statistics.VALUE_STATISTICS` has one."""


def apply_formulas(names: Sequence[str], sums: Sums) -> list[Number]:
    """Return the values of statistics, in the order of `names`.

    Without a finite value, a statistic that is not a count is None, or NaN if the sums are tensors.
    """
    if isinstance(sums.n, Tensor):
        values = ((name, FORMULAS[name](sums)) for name in names)
        return [value if name in COUNTS else torch.where(sums.n > 0, value, math.nan) for name, value in values]
    return [FORMULAS[name](sums) if sums.n or name in COUNTS else None for name in names]
