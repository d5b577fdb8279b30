"""A driver of a device that is the CPU: launches of kernels compute the same numbers with NumPy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from instrument.stats import cpu_kernel
from instrument.stats.fingerprint import portable_bits

_POINTER = ctypes.c_void_p
_LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, *[ctypes.c_uint] * 7, _POINTER, ctypes.POINTER(_POINTER), _POINTER)
_STATUS = ctypes.CFUNCTYPE(ctypes.c_int, _POINTER, ctypes.POINTER(ctypes.c_int))
_DEVICE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int))
MEASURE, COMPARE, MEASURE_WITH_BITS = 1, 2, 3  # handles of the kernels


@dataclass
class Driver:
    """What the imitated driver does.

    Attributes:
        launches: The handle, the programs and the address of the results of each launch.
        is_capturing: Whether the stream becomes a graph.
        current: The index of the current device.
        error: What a launch returns.
        during_launch: Called by each launch.
    """

    launches: list[tuple[int, int, int]] = field(default_factory=list)
    is_capturing: bool = False
    current: int = 0
    error: int = 0
    during_launch: Callable[[], object] | None = None


@contextmanager
def imitated_driver(dtype: torch.dtype = torch.float32) -> Iterator[Driver]:
    """Let slabs launch imitated kernels for CPU tensors of a dtype: float32 or float64.

    A program reads 4096 elements.
    """
    state = Driver()

    def launch(function: int, programs: int, *given: Any) -> int:
        *_, parameters, _ = given
        if state.during_launch is not None:
            state.during_launch()
        if state.error:
            return state.error

        def parameter(index: int) -> int:
            return int(ctypes.cast(parameters[index], ctypes.POINTER(ctypes.c_int64))[0])

        count = 2 if function == COMPARE else 1
        results, numel = parameter(count + 2), parameter(count + 3)
        item = np.dtype(str(dtype).removeprefix("torch."))
        elements = [_array(parameter(index), numel, item) for index in range(count)]
        tensors = [each.astype(np.float64) for each in elements]
        numbers = _effect(*tensors) if function == COMPARE else _sums(*tensors)
        if function == MEASURE_WITH_BITS:
            numbers += [float(half) for half in portable_bits(torch.from_numpy(elements[0].copy()))]
        _array(results, len(numbers), np.dtype(np.float64))[:] = numbers
        state.launches.append((function, programs, results))
        return 0

    def capture_status(stream: int, status: Any) -> int:
        status[0] = state.is_capturing
        return 0

    def current_device(number: Any) -> int:
        number[0] = state.current
        return 0

    functions = _LAUNCH(launch), _STATUS(capture_status), _DEVICE(current_device)
    cpu_kernel.connect_driver(tuple(ctypes.cast(each, _POINTER).value for each in functions), 4096)  # type: ignore[arg-type]
    memory = torch.empty(1024, 10), torch.empty(1)
    for kernel in (MEASURE, COMPARE, MEASURE_WITH_BITS):
        cpu_kernel.add_launcher(torch.device("cpu"), dtype, 0, kernel, kernel, (128, 32), memory)
    try:
        yield state
    finally:
        cpu_kernel.disconnect_driver()


def _array(address: int, count: int, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(memory, dtype)


def _sums(values: np.ndarray[Any, Any]) -> list[float]:
    x = values[np.isfinite(values)]
    extremes = [x.min(), x.max()] if len(x) else [np.inf, -np.inf]
    mean = x.mean() if len(x) else 0.0
    counts = [len(x), np.isnan(values).sum(), (values == 0).sum()]
    return [*counts, *extremes, mean, ((x - mean) ** 2).sum(), np.abs(x).sum(), 1.0]


def _effect(before: np.ndarray[Any, Any], after: np.ndarray[Any, Any]) -> list[float]:
    changed = (before != after) & ~(np.isnan(before) & np.isnan(after))
    finite = [each[np.isfinite(each)] for each in (before, after)]
    return [changed.sum(), *(np.sqrt((each**2).sum()) if len(each) else np.nan for each in finite)]
