"""Choice of how a tensor on a device is measured: by a Triton kernel, or by PyTorch operations.

The kernel is used on CUDA and ROCm devices with Triton. Tensors of a dtype are first measured in both ways, and the values are
compared when they are on the host, without waiting. If they differ, or if the kernel does not compile, the operations are
used from then on.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..spec.statistics import COUNTS
from .device_numbers import DeviceNumbers, joined
from .device_operations import measure_by_operations

BY_KERNEL = "Triton kernel"
"""The fastest way to measure; see `measured_by`."""

_Key = tuple[str, torch.device, torch.dtype]
_TOLERANCE = 1e-3  # the operations are less exact than the kernel, but wrong numbers differ by more
_ELEMENTS = ("mean", "std", "rms", "min", "max", "abs_max")  # statistics with the magnitude of an element
_MOVED = 0.1  # largest share of elements that may be in the other of two adjacent bins, because their edge is rounded

_reasons: dict[_Key, str | None] = {}
"""Why the kernel is not used, by what was compared; None if it is used."""


def measure_on_device(flat: Tensor, names: tuple[str, ...]) -> DeviceNumbers:
    """Compute statistics of a tensor on a device.

    Args:
        flat: Shape [elements], real, contiguous.
        names: Names from `instrument.spec.statistics.VALUE_STATISTICS`.

    Returns:
        The values in the order of `names`.
    """
    return _choose(
        "",
        flat,
        lambda: measure_by_operations(flat, names),
        lambda kernels: kernels.measure_by_kernel(flat, names),
        partial(_different_statistic, names),
    )


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
    if _reasons.get(key) is not None or not _is_plain(flat):
        return by_operations()
    try:
        kernels = _kernels()
        if flat.dtype not in kernels.DTYPES:
            return by_operations()
        found = by_kernel(kernels)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton's compiler can raise anything
        _reasons[key] = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
        return by_operations()
    return found if key in _reasons else joined([by_operations(), found], partial(_compared, key, different))


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
        _reasons.setdefault(key, "values that are merged on the device are not compared with the kernel")
    elif difference := different(expected, found):
        _reasons[key] = f"the kernel returned {difference}"
    _reasons.setdefault(key, None)
    return expected


def _different_statistic(names: tuple[str, ...], expected: list[Any], found: list[Any]) -> str | None:
    values = dict(zip(names, expected, strict=True))
    size = max((abs(values[name]) for name in _ELEMENTS if values.get(name) is not None), default=0.0)
    for name, other in zip(names, found, strict=True):
        one = values[name]
        if name == "std" and any(values.get(count) for count in ("nan_count", "inf_count")):
            continue  # the operations are not exact then; see `device_operations`
        is_exact = one is None or other is None or name in COUNTS
        if one != other if is_exact else not math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE * size):
            return f"{name} {other} instead of {one}"
    return None


def _different_histogram(expected: list[Any], found: list[Any]) -> str | None:
    counts, others = expected[2:], found[2:]
    moved = sum(abs(one - other) for one, other in zip(counts, others, strict=True))
    ends = [None if end is None or math.isnan(end) else end for end in expected[:2]]
    if ends == found[:2] and sum(counts) == sum(others) and moved <= 2 * _MOVED * sum(counts):
        return None
    return f"the ends and counts {found} instead of {expected}"
