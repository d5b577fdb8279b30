"""The sums of a tensor on a device, one row of numbers that the host reads when the step ends.

A device computes only few numbers. What follows from them is computed for the rows of all tensors at once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..spec.statistics import MAGNITUDES, Sum
from .device_numbers import widest
from .device_operations import measure_by_operations
from .portable import terms_of
from .sums import BASE, COLUMNS, INDEX, Matrix, add_zeros, where

RAW = (
    "nonzero",
    "not_finite",
    "nan",
    "low",
    "high",
    "origin",
    "scale",
    "variance",
    "mean",
    "magnitudes",
    "magnitudes_scale",
)
"""The numbers of `measure_by_operations`: counts of elements, of which the first is of finite ones; the extremes; an element, the
origin, and a factor; variance and mean of (origin - x) * factor, where x is the origin in place of elements that are not finite; the sum
of |x| times a factor, and this factor."""
_RAW_AT = len(COLUMNS)
DEVICE_WIDTH = _RAW_AT + len(RAW)
BY_KERNEL_COLUMNS = slice(1, len(BASE) - 1)
"""The columns that `instrument.stats.device_kernel` writes."""


FIRST_ROWS = 64


def device_memory(rows: int, device: torch.device) -> Tensor:
    """Return memory for rows, [rows, DEVICE_WIDTH] in the widest dtype of the device. All numbers are NaN."""
    with torch.inference_mode(False):
        return torch.full((rows, DEVICE_WIDTH), math.nan, dtype=widest(device), device=device)


class DeviceMemory:
    """The memory for the sums of one step on all devices. It becomes as large as the step requires."""

    def __init__(self) -> None:
        self._sizes: dict[torch.device, int] = {}  # rows of the latest step
        self._used: dict[torch.device, list[tuple[list[Tensor], Tensor]]] = {}
        self._lock = threading.Lock()

    def row(self, device: torch.device) -> Tensor:
        """Return a row for one tensor, [DEVICE_WIDTH]."""
        with self._lock:
            parts = self._used.setdefault(device, [])
            if not parts or len(parts[-1][0]) == len(parts[-1][1]):
                size = max(FIRST_ROWS, 2 * len(parts[-1][1]) if parts else self._sizes.get(device, 0))
                parts.append(([], device_memory(size, device)))
            rows, memory = parts[-1]
            rows.append(memory[len(rows)])
            return rows[-1]

    def take(self) -> list[tuple[list[Tensor], Tensor]]:
        """Return the rows of the step and their memory, [rows, DEVICE_WIDTH], and begin with new memory."""
        with self._lock:
            used, self._used = self._used, {}
        self._sizes = {device: sum(len(rows) for rows, _ in parts) for device, parts in used.items()}
        return [(rows, memory[: len(rows)]) for parts in used.values() for rows, memory in parts]


@dataclass(slots=True)
class DeviceSums:
    """The sums of one tensor on a device.

    Attributes:
        row: [DEVICE_WIDTH], a row of `device_memory`.
        numel: The number of elements, without the further zeros.
        zeros: The number of further zeros of a sparse tensor.
        terms: The measured sums with a term.
        by_kernel: Whether the row has the results of the kernel. Otherwise it has those of the operations.
        compared_as: If the row has both results: what is compared. The results of the operations are used.
    """

    row: Tensor
    numel: int
    zeros: int = 0
    terms: Sequence[Sum] = ()
    by_kernel: bool = False
    compared_as: Hashable = None

    def sums(self) -> Tensor:
        """Return the sums, [1, COLUMNS] on the device."""
        found: Tensor = sums_of_rows(self.row[None], self.numel, by_kernel=self.by_kernel)
        if self.zeros:
            found = add_zeros(found, self.zeros, self.terms)
        return found


def write_operations(flat: Tensor, row: Tensor, *, with_magnitudes: bool) -> None:
    """Write the results of the operations to a row.

    Args:
        flat: Shape [elements], real, contiguous.
        row: The row.
        with_magnitudes: Whether the sum of magnitudes is requested.
    """
    if not flat.numel():
        row[_RAW_AT : _RAW_AT + 3] = 0.0
        return
    found = measure_by_operations(flat, with_magnitudes=with_magnitudes)
    others = (found.get(name, row[:1]) for name in RAW[3:])  # the numbers of a row are NaN at first
    counts = found["nonzero"].to(row.dtype)
    row[_RAW_AT : _RAW_AT + len(counts)] = counts
    row[_RAW_AT + 3 :] = torch.cat([each.reshape(-1).to(row.dtype) for each in others])


def write_terms(flat: Tensor, sums: DeviceSums, terms: Sequence[Sum]) -> None:
    """Write sums that neither the kernel nor the operations form to a row."""
    others = [each for each in terms if each is not MAGNITUDES]
    if not others:
        return
    base = dict(zip(COLUMNS, sums_of_rows(sums.row[None], sums.numel, by_kernel=sums.by_kernel)[0], strict=True))
    x = flat.to(sums.row.dtype)
    is_finite = x.abs() < math.inf
    for each, term in zip(others, terms_of(x, base, others), strict=True):
        sums.row[INDEX[each.name]] = torch.where(is_finite, term, 0.0).sum()


def sums_of_rows(rows: Matrix, numel: Any, *, by_kernel: bool) -> Matrix:
    """Return the sums of tensors, [rows, COLUMNS], as an array if the rows are an array, or on their device.

    Args:
        rows: [rows, DEVICE_WIDTH].
        numel: The numbers of elements, one or [rows].
        by_kernel: Whether these rows have the results of the kernel.
    """
    found = rows[:, : len(COLUMNS)].clone() if isinstance(rows, Tensor) else rows[:, : len(COLUMNS)].copy()
    found[:, 0] = numel
    with np.errstate(all="ignore"):
        base = _kernel_columns(found) if by_kernel else _raw_columns(rows, found[:, 0])
    for name, column in base.items():
        found[:, INDEX[name]] = column
    return found


def _kernel_columns(found: Matrix) -> dict[str, Any]:
    n = found[:, INDEX["n"]]
    exists = where(n > 0, 0.0 * n + 1.0, math.nan * n)
    return {"unit": exists} | {name: found[:, INDEX[name]] * exists for name in ("low", "high", "mean", "deviations")}


def _raw_columns(rows: Matrix, numel: Any) -> dict[str, Any]:
    raw = {name: rows[:, _RAW_AT + at] for at, name in enumerate(RAW)}
    # Integers have no such numbers.
    for name, number in {"not_finite": 0.0, "nan": 0.0, "origin": raw["low"], "scale": 1.0}.items():
        raw[name] = where(raw[name] == raw[name], raw[name], number + 0.0 * raw["low"])
    n = numel - raw["not_finite"]
    low, high = (where(n > 0, raw[name], math.nan * n) for name in ("low", "high"))
    # Equal values have no deviations; the scaled ones may have overflowed.
    variance, mean = (where(low == high, 0.0 * n, raw[name]) for name in ("variance", "mean"))
    largest = where(high < -low, -low, high)
    positive = where(largest > 0, largest, 1.0 + 0.0 * largest)
    mantissa, _ = torch.frexp(positive) if isinstance(positive, Tensor) else np.frexp(positive)
    unit = positive / (2.0 * mantissa)  # a power of two, by which a division is exact
    share, relative = numel / n, 1.0 / (raw["scale"] * unit)
    # What is not finite has the deviation 0 from the origin. Without it, the others weigh more.
    squared = share * (variance + mean * mean * (1.0 - share)) * relative * relative
    return {
        "n": n,
        "nan": raw["nan"],
        "zeros": numel - raw["nonzero"] - raw["not_finite"],
        "low": low,
        "high": high,
        "mean": raw["origin"] / unit - mean * share * relative,
        "deviations": where(squared > 0, n * squared, 0.0 * squared),
        "magnitudes": raw["magnitudes"] / (raw["magnitudes_scale"] * unit),
        "unit": unit,
    }
