"""Extremes of 64-bit integers, which the float64 columns round beyond 2^53."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..tables.statistics import REMAINDERS
from .flatten import stored_elements
from .measure import Measured, Row
from .portable import widest
from .sums import statistics_of

EXACT_UP_TO = 2**53
_DTYPES = (torch.int64, torch.uint64)
_WORD = 2**32


def integer_extremes(tensor: Tensor, names: Sequence[str], measured: Measured, *, is_part: bool) -> Tensor | None:
    """Return the minimum and the maximum of 64-bit integers. Does not wait for a device.

    Args:
        is_part: Whether other processes have further parts of the tensor.

    Returns:
        float64 [4] on the device of the tensor: the upper 32 bits of the minimum and of the maximum, then their lower 32 bits. NaN
        for an empty tensor. None if no extreme is requested, for other dtypes, and on devices without float64 (Apple's GPUs). Also
        None for a complete CPU tensor with magnitudes below 2^53, which float64 represents exactly.
    """
    if tensor.dtype not in _DTYPES or REMAINDERS.keys().isdisjoint(names) or widest(tensor.device) != torch.float64:
        return None
    if not is_part and measured.on_device is None and not measured.statistic("abs_max") >= EXACT_UP_TO:
        return None
    flat = stored_elements(tensor)[0]
    if not len(flat):
        return torch.full((4,), math.nan, dtype=torch.float64, device=flat.device)
    is_signed = flat.dtype == torch.int64
    # PyTorch has few operations for uint64. Inverting the highest bit maps uint64 to int64 and keeps the order.
    extremes = torch.stack((flat if is_signed else flat.view(torch.int64) ^ -(2**63)).aminmax())
    upper = (extremes >> 32) + (0 if is_signed else _WORD // 2)
    return torch.cat([upper, extremes & (_WORD - 1)]).to(torch.float64)


def remainders(extremes: Iterable[Sequence[float]], names: Sequence[str], row: Row) -> dict[str, float]:
    """Return the differences between exact integers and the float64 statistics of a tensor, if they are not zero, by their names.

    Args:
        extremes: The `integer_extremes` of each part of the tensor.
        row: Its sums, float64 [COLUMNS].
    """
    parts = [[int(number) for number in part] for part in extremes if not math.isnan(part[0])]
    if not parts:
        return {}
    minimum = min(upper * _WORD + lower for upper, _, lower, _ in parts)
    maximum = max(upper * _WORD + lower for _, upper, _, lower in parts)
    exact = {"min": minimum, "max": maximum, "abs_max": max(-minimum, maximum)}
    requested = [name for name in REMAINDERS if name in names]
    rounded = [int(column.item()) for column in statistics_of(row[None], requested)]
    return {
        REMAINDERS[name]: float(exact[name] - value)
        for name, value in zip(requested, rounded, strict=True)
        if exact[name] != value
    }
