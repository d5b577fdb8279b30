"""Extremes of 64-bit integers, which the float64 columns round beyond 2^53."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from ..spec.statistics import REMAINDERS
from .flatten import stored_elements
from .measure import Measured, Row
from .portable import widest
from .sums import statistics_of

EXACT_UP_TO = 2**53
_DTYPES = (torch.int64, torch.uint64)
_WORD = 2**32


def integer_extremes(tensor: Tensor, names: Sequence[str], measured: Measured, *, is_part: bool) -> Tensor | None:
    """Return the minimum and the maximum of 64-bit integers, without waiting for a device.

    Args:
        tensor: Any tensor.
        names: The names of its statistics.
        measured: Its sums.
        is_part: Whether other processes have further parts of the tensor.

    Returns:
        The upper 32 bits of both and the lower 32 bits of both, float64 [4] on the device of the tensor; NaN for an empty
        tensor. None if float64 columns are exact: for other dtypes, and for small numbers in CPU memory that are complete. Also
        None on Apple's GPUs, which have no float64.
    """
    if tensor.dtype not in _DTYPES or REMAINDERS.keys().isdisjoint(names) or widest(tensor.device) != torch.float64:
        return None
    if not is_part and measured.on_device is None and not measured.statistic("abs_max") >= EXACT_UP_TO:
        return None
    flat = stored_elements(tensor)[0]
    if not len(flat):
        return torch.full((4,), math.nan, dtype=torch.float64, device=flat.device)
    is_signed = flat.dtype == torch.int64
    # PyTorch has few operations for uint64. With the highest bit inverted, its numbers have the order of int64.
    extremes = torch.stack((flat if is_signed else flat.view(torch.int64) ^ -(2**63)).aminmax())
    upper = (extremes >> 32) + (0 if is_signed else _WORD // 2)
    return torch.cat([upper, extremes & (_WORD - 1)]).to(torch.float64)


def remainders(extremes: Iterable[Sequence[float]], names: Sequence[str], row: Row) -> dict[str, float]:
    """Return the differences between exact integers and the float64 statistics of a tensor.

    Args:
        extremes: The `integer_extremes` of each part of the tensor.
        names: The names of its statistics.
        row: Its sums, float64 [COLUMNS].

    Returns:
        The remainders that are not zero, at most 1024 in magnitude, by their names.
    """
    parts = [[int(number) for number in part] for part in extremes if not math.isnan(part[0])]
    if not parts:
        return {}
    low = min(low * _WORD + lower for low, _, lower, _ in parts)
    high = max(high * _WORD + lower for _, high, _, lower in parts)
    exact = {"min": low, "max": high, "abs_max": max(-low, high)}
    requested = [name for name in REMAINDERS if name in names]
    rounded = [int(column.item()) for column in statistics_of(row[None], requested)]
    return {
        REMAINDERS[name]: float(exact[name] - value)
        for name, value in zip(requested, rounded, strict=True)
        if exact[name] != value
    }
