"""Choice of how a tensor on a device is measured: by a Triton kernel, or by PyTorch operations.

The kernel is used on CUDA and ROCm devices with Triton. Tensors of a dtype are first measured in both ways, and the values are
compared when they are on the host, without waiting. If they differ, or if the kernel does not compile, the operations are
used from then on.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..spec.statistics import COUNTS, MAGNITUDES, STATISTICS, Sum
from .device_numbers import DeviceNumbers, joined
from .device_sums import (
    BY_KERNEL_COLUMNS,
    COMPARED_COLUMNS,
    DeviceSums,
    device_memory,
    kernel_sums_of_row,
    sums_of_rows,
)
from .portable import PORTABLE_COLUMNS, further_sums, portable_sums
from .sums import INDEX, add_zeros, statistics_of

BY_KERNEL = "Triton kernel"
"""The fastest way to measure; see `measured_by`."""

_Key = Any  # what is computed, the device and the dtype
_TOLERANCE = 1e-6  # both are exact to about 1e-9; wrong numbers differ by more
_ELEMENTS = ("mean", "std", "rms", "min", "max", "abs_max")  # statistics with the magnitude of an element
_COMPARED = tuple(name for name, statistic in STATISTICS.items() if not statistic.needs)
_MOVED = 0.1  # largest share of elements that may be in the other of two adjacent bins, because their edge is rounded

_NOT_COMPARED = "values that are merged on the device are not compared with the kernel"

_reasons: dict[_Key, str | None] = {}
"""Why the kernel is not used, by what was compared; None if it is used."""


def measure_on_device(flat: Tensor, terms: Sequence[Sum], zeros: int, row: Tensor | None) -> DeviceSums:
    """Compute the sums of a tensor on a device.

    Args:
        flat: Shape [elements], real, contiguous.
        terms: Which sums with a term are required.
        zeros: The number of further zeros of a sparse tensor.
        row: Memory for the result, a row of `device_memory`. Default: new memory.
    """
    found = DeviceSums(device_memory(1, flat.device)[0] if row is None else row, flat.numel(), zeros, terms)
    key = "", flat.device, flat.dtype
    is_compared = key not in _reasons
    results = found.row[COMPARED_COLUMNS if is_compared else BY_KERNEL_COLUMNS]
    has_run = _is_done_by_kernel(key, flat, lambda kernels: kernels.measure_by_kernel(flat, results))
    if has_run and is_compared:
        found.compared_as = key
    if is_compared or not has_run:
        found.row[PORTABLE_COLUMNS] = portable_sums(flat)
    others = [each for each in terms if is_compared or not has_run or each is not MAGNITUDES]
    if others:
        for each, number in zip(
            others, further_sums(flat, sums_of_rows(found.row[None], found.numel)[0], others), strict=True
        ):
            found.row[INDEX[each.name]] = number
    return found


def sums_on_host(sums: Sequence[DeviceSums], rows: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the sums of tensors, float64 [rows, COLUMNS].

    Args:
        sums: The sums.
        rows: Copies of their rows in the memory of the host, [rows, DEVICE_WIDTH].
    """
    found: np.ndarray[Any, Any] = sums_of_rows(rows.astype(np.float64, copy=False), [each.numel for each in sums])
    for at, each in enumerate(sums):
        if each.compared_as is not None:
            _compare(each.compared_as, found[at], kernel_sums_of_row(rows[at], each.numel))
        if each.zeros:
            found[at] = add_zeros(found[at : at + 1], each.zeros, each.terms)[0]
    return found


def histogram_on_device(flat: Tensor, bins: int, by_operations: Callable[[], DeviceNumbers]) -> DeviceNumbers:
    """Compute a histogram of a tensor on a device.

    Args:
        flat: Shape [elements], real, contiguous.
        bins: The number of bins.
        by_operations: Computes it with PyTorch's operations.

    Returns:
        Minimum, maximum, and the counts [bins].
    """
    return _choose(
        " histogram", flat, by_operations, lambda kernels: kernels.histogram_by_kernel(flat, bins), _different_histogram
    )


def measured_by() -> dict[str, str]:
    """Return how the devices of this process measured, such as `{"cuda:0 float32": "Triton kernel"}`, for `run.json`.

    If the kernel was not used, the reason follows.
    """
    return {
        f"{device} {str(dtype).removeprefix('torch.')}{result}": BY_KERNEL
        if reason is None
        else f"PyTorch operations: {reason}"
        for (result, device, dtype), reason in _reasons.items()
    }


def _choose(
    result: str,
    flat: Tensor,
    by_operations: Callable[[], DeviceNumbers],
    by_kernel: Callable[[Any], DeviceNumbers],
    different: Callable[[list[Any], list[Any]], str | None],
) -> DeviceNumbers:
    """Compute a result with the kernel if it agrees, with operations if it does not, and otherwise in both ways.

    Args:
        result: What is computed, as a suffix for `measured_by`.
        flat: The tensor.
        by_operations: Computes it with operations.
        by_kernel: Computes it with the module of the kernels.
        different: Describes a difference between the values of the operations and those of the kernel, if there is one.
    """
    key = result, flat.device, flat.dtype
    found: list[DeviceNumbers] = []
    if not _is_done_by_kernel(key, flat, lambda kernels: found.append(by_kernel(kernels))):
        return by_operations()
    return found[0] if key in _reasons else joined([by_operations(), *found], partial(_compared, key, different))


def _is_done_by_kernel(key: _Key, flat: Tensor, run: Callable[[Any], None]) -> bool:
    """Run the kernel if it may be used. Return whether it has run. If it fails, note the reason."""
    if _reasons.get(key) is not None or not _is_plain(flat):
        return False
    try:
        kernels = _kernels()
        if flat.dtype not in kernels.DTYPES:
            return False
        run(kernels)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton's compiler can raise anything
        _reasons[key] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return False
    return True


def keep_operations(sums: DeviceSums) -> None:
    """Use the operations from now on if the host does not get these sums, which were to be compared with the kernel."""
    if sums.compared_as is not None:
        _reasons.setdefault(sums.compared_as, _NOT_COMPARED)


def _is_plain(flat: Tensor) -> bool:
    return type(flat) is Tensor and flat.is_cuda and flat.numel() > 0


@cache
def _kernels() -> Any:
    """Import the kernels.

    Raises:
        ImportError: Triton is not installed.
        RuntimeError: Triton only interprets kernels.
    """
    from . import device_kernel

    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET=1 runs kernels on the CPU")
    return device_kernel


def _compared(
    key: _Key, different: Callable[[list[Any], list[Any]], str | None], expected: list[Any], found: list[Any]
) -> list[Any]:
    """Return the values of the operations, and compare them with those of the kernel."""
    if any(isinstance(value, Tensor) for value in expected):
        _reasons.setdefault(key, _NOT_COMPARED)
    elif difference := different(expected, found):
        _reasons[key] = f"the kernel returned {difference}"
    _reasons.setdefault(key, None)
    return expected


def _compare(key: Any, expected: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> None:
    """Compare the sums of the operations with those of the kernel, [COLUMNS]."""
    both = zip(
        *(np.concatenate(statistics_of(row[None], _COMPARED)).tolist() for row in (expected, found)), strict=True
    )
    values = dict(zip(_COMPARED, both, strict=True))
    size = max((abs(values[name][0]) for name in _ELEMENTS if not math.isnan(values[name][0])), default=0.0)
    for name, (one, other) in values.items():
        is_exact = name in COUNTS or math.isnan(one) or math.isnan(other)
        is_equal = one == other or (math.isnan(one) and math.isnan(other))
        if not (is_equal if is_exact else math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE * size)):
            _reasons[key] = f"the kernel returned {name} {other} instead of {one}"
            break
    _reasons.setdefault(key, None)


def _different_histogram(expected: list[Any], found: list[Any]) -> str | None:
    counts, others = expected[2:], found[2:]
    moved = sum(abs(one - other) for one, other in zip(counts, others, strict=True))
    ends = [None if end is None or math.isnan(end) else end for end in expected[:2]]
    if ends == found[:2] and sum(counts) == sum(others) and moved <= 2 * _MOVED * sum(counts):
        return None
    return f"the ends and counts {found} instead of {expected}"
