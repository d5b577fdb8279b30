"""Measurement of a tensor, on the CPU or on another device.

On the CPU, a compiled kernel reads the tensor once (`instrument.stats.single_pass`); tensors that it does not support
are measured in blocks (`instrument.stats.blocks`). On other devices, one launch (`instrument.stats.device_kernel`) or few
operations (`instrument.stats.device_operations`) compute sums that stay on the device until the step ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from ..spec.statistics import ALL
from .blocks import measure_blocks
from .device_choice import measure_on_device
from .device_numbers import DeviceNumbers
from .flatten import as_vector
from .single_pass import measure_in_one_pass

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
    if not _is_plain(tensor):
        tensor = as_vector(tensor)
        if not tensor.is_cpu:
            return measure_on_device(tensor, names)
    return measure_on_host(tensor, names)


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
