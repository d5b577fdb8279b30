"""Measurement of a tensor, on the CPU or on another device.

On the CPU, a compiled kernel reads the tensor once (`instrument.stats.single_pass`); tensors that it does not support
are measured in blocks (`instrument.stats.blocks`). On other devices, one launch (`instrument.stats.device_kernel`) or few
operations (`instrument.stats.device_operations`) compute sums that stay on the device until the step ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from ..spec.statistics import ALL
from .blocks import measure_blocks
from .device_choice import measure_on_device
from .device_numbers import DeviceNumbers, joined
from .flatten import stored_elements
from .formulas import Sums, apply_formulas, maximum
from .single_pass import measure_in_one_pass

MEASURED = ("numel", "mean", "std", "min", "max", "l2", "zero_fraction", "nan_count", "inf_count")
"""The statistics that are measured of a part of a tensor, from which all others follow; `l1` in addition if requested."""

Values = Sequence[float | None] | DeviceNumbers
"""The result of `measure`: numbers and None, or numbers that are still on a device."""


def measure(tensor: Tensor, names: tuple[str, ...]) -> Values:
    """Compute statistics of a tensor of any shape, layout, dtype and device.

    Args:
        tensor: The tensor. It is not modified.
        names: Names from `instrument.spec.statistics.VALUE_STATISTICS`.

    Returns:
        The values in the order of `names`. For a CPU tensor: numbers and None. Otherwise: numbers on the device of the
        tensor.
    """
    if _is_plain(tensor):
        return measure_on_host(tensor, names)
    vector, zeros = stored_elements(tensor)
    measured = part_statistics(names) if zeros else names
    values = measure_on_host(vector, measured) if vector.is_cpu else measure_on_device(vector, measured)
    if not zeros:
        return values
    with_zeros = partial(_with_zeros, names, zeros)
    return joined([values], with_zeros) if isinstance(values, DeviceNumbers) else with_zeros(values)


def part_statistics(names: Sequence[str]) -> tuple[str, ...]:
    """Return the statistics to measure of a part of a tensor, for the statistics `names` of the complete tensor."""
    return (*MEASURED, "l1") if "l1" in names else MEASURED


def _with_zeros(names: tuple[str, ...], zeros: int, values: Sequence[Any]) -> list[Any]:
    """Return the statistics of a tensor with further zeros.

    Args:
        names: The statistics.
        zeros: The number of further zeros.
        values: The `part_statistics` of the other elements, of which at least one is finite, and one is zero.
    """
    part = dict(zip(part_statistics(names), values, strict=True))
    others = part["numel"] - part["nan_count"] - part["inf_count"]
    n = others + zeros
    largest = maximum(abs(part["min"]), abs(part["max"]))
    unit = largest + (largest == 0)
    mean, std, share = part["mean"] / unit, part["std"] / unit, others / n
    sums = Sums(
        numel=part["numel"] + zeros,
        n=n,
        nan_count=part["nan_count"],
        inf_count=part["inf_count"],
        zeros=(others * part["zero_fraction"] + 0.5) // 1 + zeros,
        low=part["min"],
        high=part["max"],
        mean=mean * share,
        variance=share * (std * std + mean * mean * (zeros / n)),
        squares=(part["l2"] / unit) * (part["l2"] / unit),
        magnitudes=part["l1"] / unit if "l1" in part else math.nan,
        unit=unit,
    )
    return apply_formulas(names, sums)


def measure_on_host(tensor: Tensor, names: tuple[str, ...]) -> list[float | None]:
    """Compute statistics of a CPU tensor whose elements are a contiguous block; see `measure`."""
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
