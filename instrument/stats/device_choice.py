"""Choice of how a tensor on a device is measured: by one launch of a Triton kernel, or by several operations.

The kernel is used on CUDA and ROCm devices with Triton. Tensors of a dtype are first measured in both ways, and the values are
compared when they are on the host, without waiting. If they differ, or if the kernel does not compile, the operations are
used from then on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ..spec.statistics import COUNTS
from .device_numbers import DeviceNumbers, joined
from .device_operations import measure_by_operations

ONE_LAUNCH = "one launch"
"""How the kernel measures a tensor; see `measured_by`."""

_Key = tuple[torch.device, torch.dtype]
_TOLERANCE = 1e-3  # the operations are less exact than the kernel, but wrong numbers differ by more
_ELEMENTS = ("mean", "std", "rms", "min", "max", "abs_max")  # statistics with the magnitude of an element

_kernel_agrees: dict[_Key, bool] = {}
_reasons: dict[_Key, str] = {}


def measure_on_device(flat: Tensor, names: tuple[str, ...]) -> DeviceNumbers:
    """Compute statistics of a tensor on a device.

    Args:
        flat: Shape [elements], real, contiguous.
        names: Names from `instrument.spec.statistics.VALUE_STATISTICS`.

    Returns:
        The values in the order of `names`.
    """
    key = flat.device, flat.dtype
    if _kernel_agrees.get(key) is False or not _is_plain(flat):
        return measure_by_operations(flat, names)
    try:
        kernel, dtypes = _kernel()
        if flat.dtype not in dtypes:
            return measure_by_operations(flat, names)
        by_kernel = kernel(flat, names)
    except Exception as error:  # Triton's compiler can raise anything
        _reject(key, f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}")
        return measure_by_operations(flat, names)
    if key in _kernel_agrees:
        return by_kernel
    return joined([measure_by_operations(flat, names), by_kernel], partial(_compared, key, names))


def measured_by() -> dict[str, str]:
    """Return how the devices of this process measured, such as `{"cuda:0 float32": "one launch"}`, for `run.json`.

    If the kernel was not used, the reason follows.
    """
    return {
        f"{device} {str(dtype).removeprefix('torch.')}": ONE_LAUNCH
        if agrees
        else f"several launches: {_reasons[device, dtype]}"
        for (device, dtype), agrees in _kernel_agrees.items()
    }


def _is_plain(flat: Tensor) -> bool:
    return type(flat) is Tensor and flat.is_cuda and flat.numel() > 0


@cache
def _kernel() -> tuple[Callable[[Tensor, Sequence[str]], DeviceNumbers], tuple[torch.dtype, ...]]:
    """Return the kernel, and the dtypes that it reads.

    Raises:
        ImportError: Triton is not installed.
        RuntimeError: Triton only interprets kernels.
    """
    from triton import knobs

    from .device_kernel import DTYPES, measure_by_kernel

    if knobs.runtime.interpret:
        raise RuntimeError("TRITON_INTERPRET=1 runs kernels on the CPU")
    return measure_by_kernel, DTYPES


def _reject(key: _Key, reason: str) -> None:
    _kernel_agrees[key] = False
    _reasons[key] = reason


def _compared(key: _Key, names: tuple[str, ...], expected: list[Any], found: list[Any]) -> list[Any]:
    """Return the values of the operations, after a comparison with those of the kernel if they are on the host."""
    if any(isinstance(value, Tensor) for value in expected):
        return expected
    values = dict(zip(names, expected, strict=True))
    size = max((abs(values[name]) for name in _ELEMENTS if values.get(name) is not None), default=0.0)
    for name, other in zip(names, found, strict=True):
        if not _agree(name, values[name], other, size):
            _reject(key, f"the kernel returned {name} {other} instead of {values[name]}")
            return expected
    _kernel_agrees.setdefault(key, True)
    return expected


def _agree(name: str, one: float | None, other: float | None, size: float) -> bool:
    if one is None or other is None or name in COUNTS:
        return one == other
    return math.isclose(one, other, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE * size)
