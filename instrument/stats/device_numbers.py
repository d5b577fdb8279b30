"""Numbers that are still on a device, and how values follow from them on the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ..nested import to_device


@dataclass(frozen=True, slots=True)
class DeviceNumbers:
    """Numbers on a device that are read when the step ends, so that a hook never waits for the device.

    A device computes only sums and extremes. Formulas are applied on the host, where they cost no launches and where
    float64 always exists.

    Attributes:
        numbers: Small tensors of any dtype and shape.
        convert: Converts all numbers in their order, as floats or as float64 scalars on the device, to the values: a
            list of numbers, with None or NaN for no value.
    """

    numbers: tuple[Tensor, ...]
    convert: Callable[[Sequence[Any]], list[Any]]

    def values(self, fetched: Iterator[list[float]]) -> list[float | None]:
        """Return the values.

        Args:
            fetched: The numbers of each tensor of `numbers`, on the host.
        """
        values: list[float | None] = self.convert([number for _ in self.numbers for number in next(fetched)])
        return values

    def on_device(self) -> Tensor:
        """Return the values [values] on the device in its widest dtype, with NaN for no value."""
        dtype = widest(self.numbers[0].device)
        numbers = torch.cat([tensor.reshape(-1).to(dtype) for tensor in self.numbers])
        nan = torch.full_like(numbers[0], torch.nan)
        return torch.stack([nan if value is None else value for value in self.convert(numbers.unbind())])

    def read(self) -> list[float | None]:
        """Return the values, after waiting for the device."""
        return self.values(iter([tensor.reshape(-1).tolist() for tensor in self.numbers]))


Values = Sequence[float | None] | DeviceNumbers
"""Numbers and None, or numbers that are still on a device."""


def joined(parts: Sequence[DeviceNumbers], convert: Callable[..., list[Any]]) -> DeviceNumbers:
    """Combine numbers.

    Args:
        parts: The parts.
        convert: Receives the values of each part as a list, and returns the values of the combination.
    """

    def convert_all(numbers: Sequence[Any]) -> list[Any]:
        values, start = [], 0
        for part, count in zip(parts, counts, strict=True):
            values.append(part.convert(numbers[start : start + count]))
            start += count
        return convert(*values)

    counts = [sum(tensor.numel() for tensor in part.numbers) for part in parts]
    return DeviceNumbers(tuple(tensor for part in parts for tensor in part.numbers), convert_all)


def widest(device: torch.device) -> torch.dtype:
    """Return the floating-point dtype of the highest precision on a device: float64, except on Apple's GPUs."""
    return torch.float32 if device.type == "mps" else torch.float64


@lru_cache(maxsize=128)
def constants(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return constants [numbers] on a device. They are copied to it once, without waiting."""
    with torch.inference_mode(False):
        moved: Tensor = to_device(torch.tensor(numbers, dtype=dtype), device)
    return moved
