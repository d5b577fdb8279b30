"""Measurement of a tensor: its sums, on the CPU or on another device.

On the CPU, a compiled kernel reads the tensor once (`instrument.stats.cpu_kernel`); others are measured by PyTorch operations
(`instrument.stats.portable`). On other devices, one launch (`instrument.stats.device_kernel`) or the same operations compute
sums that stay on the device until the step ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from ..tables.statistics import FORM, MAGNITUDES, Sum, statistic_of
from .cast_operations import FINITE, TensorCast, lost_by_operations
from .cpu_kernel import kernel_sums
from .device_choice import measure_on_device
from .device_sums import DeviceSums, sums_on_host
from .fingerprint import form_of
from .flatten import is_on_host, stored_elements
from .portable import SAFE_EXPONENT, further_sums, portable_sums
from .sums import COLUMNS, INDEX, MEASURED_COLUMNS, add_zeros, needs_of, statistics_of

Row = np.ndarray[Any, np.dtype[np.float64]]
_SAFE = 2.0**SAFE_EXPONENT
_HIGH_POWER = 3  # from which powers of float64 numbers can overflow although their squares do not


@dataclass(slots=True)
class Measured:
    """The sums of one tensor."""

    # float64 [COLUMNS]; NaN for missing numbers, and for those on a device.
    row: Row = field(default_factory=lambda: np.full(len(COLUMNS), np.nan))
    on_device: DeviceSums | None = None  # the sums on a device; None for a CPU tensor
    holds: bool | Tensor | None = None  # whether the condition of `when` holds; None without a condition
    exact_extremes: Tensor | None = None  # the result of `integer_extremes`; None without one
    lost: tuple[Tensor, Tensor] | None = None  # what a cast loses; see `TensorCast`

    def __setitem__(self, sum_: Sum, number: float | Tensor | None) -> None:
        if self.on_device is not None and isinstance(number, Tensor):
            self.on_device.row[INDEX[sum_.name]] = number
        else:
            self.row[INDEX[sum_.name]] = np.nan if number is None else float(number)

    @property
    def amax(self) -> float | Tensor:
        """The largest magnitude of the finite elements, a number or a scalar tensor; NaN or infinity without a finite element."""
        low, high = INDEX["low"], INDEX["high"]
        if self.on_device is None:
            return max(abs(self.row.item(low)), abs(self.row.item(high)))
        return self.on_device.row[low : high + 1].abs().amax()

    def statistics(self, names: Sequence[str]) -> list[float | None]:
        """Return statistics, None for no value. Waits for a device."""
        row = self.row if self.on_device is None else on_host([self], self.on_device.row[None].numpy(force=True))[0]
        values = [column.item() for column in statistics_of(row[None], names)]
        return [as_cell(name, value) for name, value in zip(names, values, strict=True)]

    def statistic(self, name: str) -> float | Tensor:
        """Return one statistic; NaN for no value. A scalar tensor if it is on a device."""
        if self.on_device is None:
            return float(statistics_of(self.row[None], (name,))[0].item())
        value: Tensor = statistics_of(sums_on_device([self]), (name,))[0][0]
        return value


def on_host(measured: Sequence[Measured], rows: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return sums that were on a device, float64 [rows, COLUMNS], given copies of their rows in the memory of the host."""
    sums = sums_on_host([each.on_device for each in measured if each.on_device is not None], rows)
    others = np.stack([each.row for each in measured])
    return np.where(np.isnan(others), sums, others)


def sums_on_device(measured: Sequence[Measured]) -> Tensor:
    """Return sums as one matrix on their device, [rows, COLUMNS]."""
    sums = torch.cat([each.on_device.sums() for each in measured if each.on_device is not None])
    for at, column in np.argwhere(~np.isnan(np.stack([each.row for each in measured]))).tolist():
        sums[at, column] = measured[at].row[column].item()
    return sums


def as_cell(name: str, value: float) -> float | None:
    """Return the value of a statistic as the cell of a row: None for NaN, counts as integers."""
    if np.isnan(value):
        return None
    return int(value) if statistic_of(name).dtype == "int64" else value


CastOf = Callable[[Tensor], TensorCast]
"""A function that returns the cast of a tensor."""


def measure(
    tensor: Tensor, needs: Sequence[Sum] = (), memory: Tensor | None = None, cast_of: CastOf | None = None
) -> Measured:
    """Compute the sums of a tensor of any shape, layout, dtype and device. It is not modified.

    Args:
        needs: Which sums with a term are required, in addition to those of every tensor. Sums of the fingerprint are included
            where a kernel computes them from the same read.
        memory: float64 [COLUMNS] on the device of the tensor, for the result. Default: new memory.
        cast_of: A cast to compute in the same read, where a kernel measures the tensor.
    """
    if FORM in needs and tensor.layout == torch.strided and not tensor.is_nested:
        tensor = tensor.detach().resolve_neg().contiguous()  # one copy for all
    is_plain = _is_plain(tensor)
    with_bits = is_plain and FORM in needs
    flat, zeros = (tensor, 0) if is_plain else stored_elements(tensor)
    cast = None if cast_of is None else cast_of(tensor if tensor.layout == torch.strided else flat)
    terms = [each for each in needs if each.term is not None]
    if is_on_host(flat):
        row = _host_sums(flat, terms, cast, with_bits=with_bits)
        measured = Measured(add_zeros(row[None], zeros, terms)[0] if zeros else row)
    else:
        vector = flat.detach().reshape(-1)
        sums = measure_on_device(vector, terms, zeros, memory, cast, with_bits=with_bits)
        measured = Measured(on_device=sums)
        if sums.has_bits:
            measured.row[INDEX[FORM.name]] = form_of(tensor.dtype, tensor.shape)
    if cast is not None:
        measured.lost = cast.lost or lost_by_operations(flat.detach().reshape(-1), cast)
        measured.lost[0][FINITE] += zeros
    return measured


def measure_statistics(tensor: Tensor, names: Sequence[str]) -> list[float | None]:
    """Return statistics of the values of a tensor, None for no value; see `measure`. Waits for a device."""
    return measure(tensor, needs_of(tuple(names))).statistics(names)


def _host_sums(flat: Tensor, terms: Sequence[Sum], cast: TensorCast | None, *, with_bits: bool) -> Row:
    """Return the sums of a CPU tensor whose elements are a contiguous block, float64 [COLUMNS].

    With bits, the compiled kernel adds those of the fingerprint, for a contiguous tensor of a dtype that it supports.
    """
    row = np.full(len(COLUMNS), np.nan)
    base = kernel_sums(flat, (MAGNITUDES in terms) + 2 * with_bits, cast)
    high_power = any(each.power >= _HIGH_POWER for each in terms)
    if base is not None and high_power and not 1 / _SAFE <= np.abs(base[[4, 5]]).max() <= _SAFE:
        base = None
    if base is None:
        row[MEASURED_COLUMNS] = portable_sums(flat.detach().reshape(-1)).numpy()
        row[0] = flat.numel()
    else:
        row[: len(base)] = base
        if with_bits:
            row[INDEX[FORM.name]] = form_of(flat.dtype, flat.shape)
    if missing := [each for each in terms if np.isnan(row[INDEX[each.name]])]:
        sums = further_sums(flat.detach().reshape(-1), torch.from_numpy(row), missing)
        row[[INDEX[each.name] for each in missing]] = [float(each) for each in sums]
    return row


def _is_plain(tensor: Tensor) -> bool:
    """Return whether the elements of a tensor are a contiguous block, the most common case."""
    return (
        type(tensor) in (Tensor, Parameter)
        and tensor.layout == torch.strided
        and tensor.is_floating_point()
        and not tensor.is_nested
        and tensor.is_contiguous()
        and not tensor.is_neg()
    )
