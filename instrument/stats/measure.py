"""Measurement of a tensor, on the CPU or on another device.

On the CPU, a compiled kernel reads the tensor once (`instrument.stats.single_pass`); tensors that it does not support
are measured in blocks (`instrument.stats.blocks`). On other devices, the same numbers are computed by operations on the
complete tensor that never wait for the device. They stay on the device until the step ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from ..spec.statistics import ALL
from .blocks import MAX_EXPONENT, measure_blocks
from .flatten import as_vector
from .formulas import FORMULAS, Sums
from .single_pass import measure_in_one_pass

Values = Sequence[float | None] | Tensor
"""The result of `measure`: numbers and None, or a float64 tensor [statistics] on the device, with NaN for None."""


def measure(tensor: Tensor, names: tuple[str, ...]) -> Values:
    """Compute statistics of a tensor of any shape, layout, dtype and device.

    Args:
        tensor: The tensor. It is not modified.
        names: Names from `instrument.spec.statistics.VALUE_STATISTICS`.

    Returns:
        The values in the order of `names`. For a CPU tensor: numbers and None. Otherwise: a float64 tensor [len(names)]
        on the device of the tensor, with NaN instead of None.
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
    """Return whether the elements of a tensor are a contiguous block in CPU memory, the most common case."""
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
    """Return the indices of statistics in the list of all statistics."""
    return tuple(ALL.index(name) for name in names)


def measure_on_device(flat: Tensor, names: Sequence[str]) -> Tensor:
    """Compute statistics of a flat tensor without branches on values, so that the host never waits for the device.

    Returns:
        float64, shape [len(names)], on the device of the tensor; NaN for missing values.
    """
    x = flat.to(torch.float64)
    finite = x.isfinite()
    n = finite.sum(dtype=torch.float64)
    finite_values = torch.where(finite, x, 0.0)
    unit = _unit_on_device(finite_values) if flat.dtype == torch.float64 and x.numel() else torch.ones_like(n)
    finite_values = finite_values / unit
    nan_if_empty = torch.where(n == 0, math.nan, 0.0)  # added to statistics that have no value if nothing is finite
    squares = finite_values.square().sum() + nan_if_empty
    if x.numel():
        low = torch.where(finite, x, math.inf).amin()
        high = torch.where(finite, x, -math.inf).amax()
    else:
        low = high = nan_if_empty
    pivot = low / unit
    shifted = torch.where(finite, finite_values - pivot, 0.0)
    mean = shifted.sum() / n
    centered = torch.where(finite, shifted - mean, 0.0)
    drift = centered.sum()
    sums = Sums(
        numel=torch.full_like(n, x.numel()),
        n=n,
        nan_count=x.isnan().sum(dtype=torch.float64),
        inf_count=x.isinf().sum(dtype=torch.float64),
        zeros=(x == 0).sum(dtype=torch.float64),
        low=low + nan_if_empty,
        high=high + nan_if_empty,
        mean=pivot + mean,
        variance=((centered.square().sum() - drift * drift / n) / n).clamp(min=0.0),
        squares=squares,
        magnitudes=finite_values.abs().sum() + nan_if_empty if "l1" in names else nan_if_empty,
        unit=unit,
    )
    return torch.stack([FORMULAS[name](sums) for name in names])


def _unit_on_device(finite_values: Tensor) -> Tensor:
    """Return a unit for finite values, like `instrument.stats.blocks._unit`, without branches on values."""
    exponent = torch.frexp(finite_values.abs().amax()).exponent.clamp(-MAX_EXPONENT, MAX_EXPONENT)
    return torch.exp2(exponent.to(torch.float64))
