"""The one function that measures a tensor, and the two ways it has of doing so.

On the CPU the tensor is read once by a compiled kernel (`instrument.stats.single_pass`), or, where that is not the way,
in blocks that fit a cache (`instrument.stats.blocks`). On any other device the same
numbers are formed by whole-tensor operations that never wait for the device; they stay there until the step ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from ..spec.statistics import ALL
from .blocks import MOST_EXPONENT, measure_blocks
from .single_pass import measure_in_one_pass
from .vector import as_vector

Values = Sequence[float | None] | Tensor
"""What `measure` gives: numbers, or a float64 tensor of shape [statistics] on the device, NaN where there is none."""


def measure(tensor: Tensor, names: tuple[str, ...]) -> Values:
    """Statistics of a tensor of any shape, layout, dtype and device.

    Args:
        tensor: What is measured; it is read, never written.
        names: Names from `instrument.spec.statistics.OF_VALUES`.

    Returns:
        The values in the order of `names`: numbers and None for a tensor on the CPU; a float64 tensor of shape
        [len(names)] on the tensor's own device elsewhere, in which NaN stands for None.
    """
    if not _is_plain(tensor):
        tensor = as_vector(tensor)
        if not tensor.is_cpu:
            return measure_on_device(tensor, names)
    wide = tensor.detach().to(torch.float32) if tensor.dtype == torch.float16 else tensor
    row = measure_in_one_pass(wide, "l1" in names)
    if row is not None:
        return [row[i] for i in positions(names)]
    values = measure_blocks(tensor.detach().view(-1), names)
    return [values[name] for name in names]


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor's elements lie in memory as they are, without a gap: nearly all do."""
    return (
        type(tensor) in (Tensor, Parameter)
        and tensor.is_cpu
        and tensor.layout == torch.strided
        and tensor.is_floating_point()
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )


@cache
def positions(names: tuple[str, ...]) -> tuple[int, ...]:
    """Where statistics stand among all of them."""
    return tuple(ALL.index(name) for name in names)


def measure_on_device(flat: Tensor, names: Sequence[str]) -> Tensor:
    """All statistics of a flat tensor with no branch on its values, and so with no wait for its device.

    Returns:
        float64, shape [len(names)], on the tensor's device; NaN where a statistic has no value.
    """
    x = flat.to(torch.float64)
    finite = x.isfinite()
    n = finite.sum(dtype=torch.float64)
    kept = torch.where(finite, x, 0.0)
    unit = _unit_on_device(kept) if flat.dtype == torch.float64 and x.numel() else torch.ones_like(n)
    kept = kept / unit
    none = torch.where(n == 0, math.nan, 0.0)  # added to what has no value where nothing is finite
    squares = kept.square().sum()
    if x.numel():
        low = torch.where(finite, x, math.inf).amin()
        high = torch.where(finite, x, -math.inf).amax()
    else:
        low = high = none
    pivot = low / unit
    moved = torch.where(finite, kept - pivot, 0.0)
    mean = moved.sum() / n
    centred = torch.where(finite, moved - mean, 0.0)
    drift = centred.sum()
    values = {
        "numel": torch.full_like(n, x.numel()),
        "mean": (pivot + mean) * unit,
        "std": ((centred.square().sum() - drift * drift / n) / n).clamp(min=0.0).sqrt() * unit,
        "rms": (squares / n).sqrt() * unit,
        "min": low + none,
        "max": high + none,
        "abs_max": torch.maximum(low.abs(), high.abs()) + none,
        "l1": kept.abs().sum() * unit + none,
        "l2": squares.sqrt() * unit + none,
        "zero_fraction": ((x == 0).sum(dtype=torch.float64)) / n,
        "nan_count": x.isnan().sum(dtype=torch.float64),
        "inf_count": x.isinf().sum(dtype=torch.float64),
    }
    return torch.stack([values[name] for name in names])


def _unit_on_device(kept: Tensor) -> Tensor:
    """As `_unit`, of finite values and without a branch on them."""
    exponent = torch.frexp(kept.abs().amax()).exponent.clamp(-MOST_EXPONENT, MOST_EXPONENT)
    return torch.exp2(exponent.to(torch.float64))
