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

from ..spec.statistics import Sum
from .device_numbers import widest
from .sums import BASE, COLUMNS, INDEX, Matrix, add_zeros, where

DEVICE_WIDTH = len(COLUMNS) + len(BASE)
"""The sums, and the results of the kernel if they are compared with those of the operations."""
BY_KERNEL_COLUMNS = slice(1, len(BASE) - 1)
"""The columns that `instrument.stats.device_kernel` writes."""
COMPARED_COLUMNS = slice(len(COLUMNS) + 1, DEVICE_WIDTH - 1)
"""The same columns of results to compare."""
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
        compared_as: What is compared, if the row also has the results of the kernel.
    """

    row: Tensor
    numel: int
    zeros: int = 0
    terms: Sequence[Sum] = ()
    compared_as: Hashable = None

    def sums(self) -> Tensor:
        """Return the sums, [1, COLUMNS] on the device."""
        found: Tensor = sums_of_rows(self.row[None], self.numel)
        if self.zeros:
            found = add_zeros(found, self.zeros, self.terms)
        return found


def sums_of_rows(rows: Matrix, numel: Any) -> Matrix:
    """Return the sums of tensors, [rows, COLUMNS], as an array if the rows are an array, or on their device.

    Args:
        rows: [rows, DEVICE_WIDTH].
        numel: The numbers of elements, one or [rows].
    """
    found = rows[:, : len(COLUMNS)].clone() if isinstance(rows, Tensor) else rows[:, : len(COLUMNS)].copy()
    found[:, 0] = numel
    n, unit = found[:, INDEX["n"]], found[:, INDEX["unit"]]
    exists = where(n > 0, 0.0 * n, math.nan * n)
    # The kernel writes no unit, which is 1.
    found[:, INDEX["unit"]] = where(unit == unit, unit, 1.0 + exists)  # noqa: PLR0124
    with np.errstate(invalid="ignore"):
        for name in ("low", "high", "mean", "deviations"):
            found[:, INDEX[name]] += exists
    return found


def kernel_sums_of_row(row: Matrix, numel: int) -> Matrix:
    """Return those sums of one tensor that the kernel has computed for the comparison, [COLUMNS]; see `sums_of_rows`."""
    found = np.full(DEVICE_WIDTH, math.nan)
    found[BY_KERNEL_COLUMNS] = row[COMPARED_COLUMNS]
    return sums_of_rows(found[None], numel)[0]
