"""Asynchronous copies of numbers from a device to the host.

A copy starts when a step ends and is read when the next step ends. The device has completed it by then, so the host
does not wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_HOST = torch.device("cpu")


class Transfer:
    """Copies the numbers of many small tensors, with one copy per device and dtype."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._layout = [((tensor.device, tensor.dtype), tensor.numel()) for tensor in tensors]
        self._copies: dict[tuple[torch.device, torch.dtype], _Copy | _HostNumber] = {}
        if len(tensors) == 1 and self._layout[0][0][0] == _HOST and tensors[0].numel() == 1:  # most often a loss
            self._copies[self._layout[0][0]] = _HostNumber(tensors[0])
            return
        for key in dict.fromkeys(key for key, _ in self._layout):
            flat = [
                tensor.detach().reshape(-1)
                for tensor, (own_key, _) in zip(tensors, self._layout, strict=True)
                if own_key == key
            ]
            self._copies[key] = _Copy(torch.cat(flat))

    @property
    def is_complete(self) -> bool:
        """Whether the numbers can be read without waiting, because all of them were in CPU memory."""
        return all(device.type == "cpu" for device, _ in self._copies)

    def read(self) -> Iterator[list[float]]:
        """Yield the numbers of each tensor in order. This waits for copies that are not complete."""
        numbers = {key: copy.numbers() for key, copy in self._copies.items()}
        offsets = dict.fromkeys(numbers, 0)
        for key, count in self._layout:
            start = offsets[key]
            offsets[key] += count
            yield numbers[key][start : offsets[key]]


class _Copy:
    """An asynchronous copy of one vector to the CPU. From a CUDA device, it goes to pinned memory."""

    def __init__(self, vector: Tensor) -> None:
        self.vector = vector
        self.copied_event: torch.cuda.Event | None = None
        if vector.is_cuda:
            self.vector = torch.empty(vector.shape, dtype=vector.dtype, pin_memory=True)
            self.vector.copy_(vector, non_blocking=True)
            self.copied_event = torch.cuda.Event()
            self.copied_event.record(torch.cuda.current_stream(vector.device))

    def numbers(self) -> list[float]:
        if self.copied_event is not None:
            self.copied_event.synchronize()
        values: list[float] = self.vector.tolist()
        return values


class _HostNumber:
    """One number in CPU memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.number = float(tensor.item())

    def numbers(self) -> list[float]:
        return [self.number]


class PendingMetrics(Mapping[str, float | None]):
    """A row of metrics that is being copied. Reading it waits for the copy."""

    def __init__(self, read: Callable[[], dict[str, Any]]) -> None:
        self._read = read
        self._row: dict[str, Any] | None = None

    @property
    def row(self) -> dict[str, Any]:
        """The row. Waits for the copy."""
        if self._row is None:
            self._row = self._read()
        return self._row

    def __getitem__(self, name: str) -> float | None:
        value: float | None = self.row[name]
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.row)

    def __len__(self) -> int:
        return len(self.row)
