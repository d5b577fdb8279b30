"""The sums of a tensor on a device, one row of numbers that the host reads when the step ends.

A device computes only few numbers. What follows from them is computed for the rows of all tensors at once.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..tables.statistics import Sum
from .portable import widest
from .sums import COLUMNS, add_zeros

FIRST_ROWS = 64


def device_memory(rows: int, device: torch.device) -> Tensor:
    """Return memory for rows, [rows, COLUMNS] in the widest dtype of the device. All numbers are NaN."""
    with torch.inference_mode(False):
        return torch.full((rows, len(COLUMNS)), math.nan, dtype=widest(device), device=device)


class DeviceMemory:
    """The memory for the sums of one step on all devices. It becomes as large as the step requires."""

    def __init__(self) -> None:
        self._sizes: dict[torch.device, int] = {}  # rows of the latest step
        self._used: dict[torch.device, list[tuple[list[Tensor], Tensor]]] = {}
        self._lock = threading.Lock()

    @property
    def is_used(self) -> bool:
        """Whether the step has rows on a device, also those that another process writes."""
        return bool(self._used)

    def row(self, device: torch.device) -> Tensor:
        """Return a row for one tensor, [COLUMNS]."""
        with self._lock:
            parts = self._used.setdefault(device, [])
            if not parts or len(parts[-1][0]) == len(parts[-1][1]):
                size = max(FIRST_ROWS, 2 * len(parts[-1][1]) if parts else self._sizes.get(device, 0))
                parts.append(([], device_memory(size, device)))
            rows, memory = parts[-1]
            rows.append(memory[len(rows)])
            return rows[-1]

    def take(self) -> list[tuple[list[Tensor], Tensor]]:
        """Return the rows of the step and their memory, [rows, COLUMNS], and begin with new memory."""
        with self._lock:
            used, self._used = self._used, {}
        self._sizes = {device: sum(len(rows) for rows, _ in parts) for device, parts in used.items()}
        return [(rows, memory[: len(rows)]) for parts in used.values() for rows, memory in parts]


@dataclass(slots=True)
class DeviceSums:
    """The sums of one tensor on a device."""

    row: Tensor  # [COLUMNS], a row of `device_memory`
    numel: int  # the number of elements, without the further zeros
    zeros: int = 0  # the number of further zeros of a sparse tensor
    terms: Sequence[Sum] = ()  # the measured sums with a term
    has_bits: bool = False  # whether the row has the sum of bits

    def sums(self) -> Tensor:
        """Return the sums, [1, COLUMNS] on the device."""
        matrix = self.row[None].clone()
        matrix[:, 0] = self.numel
        return add_zeros(matrix, self.zeros, self.terms) if self.zeros else matrix


def sums_on_host(sums: Sequence[DeviceSums], rows: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the sums of tensors, float64 [rows, COLUMNS], given copies of their rows in the memory of the host, [rows, COLUMNS]."""
    matrix: np.ndarray[Any, Any] = rows.astype(np.float64)
    matrix[:, 0] = [each.numel for each in sums]
    for at, each in enumerate(sums):
        if each.zeros:
            matrix[at] = add_zeros(matrix[at : at + 1], each.zeros, each.terms)[0]
    return matrix
