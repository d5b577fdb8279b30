"""Choice of how a tensor on a device is measured: by Triton kernels, or by PyTorch operations.

The kernels are used on CUDA and ROCm devices with Triton. Before the first tensor of a dtype, they measure known values. This is the
only time that the host waits for the device. If a kernel does not compile, or returns wrong numbers, the operations are used.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..errors import first_line
from ..tables.formats import FORMATS
from ..tables.statistics import MAGNITUDES, STATISTICS, Sum
from .cast_operations import NUMBERS, SCALE, TensorCast, lost_by_operations
from .cpu_kernel import DTYPE_OF_KIND, Slab, disconnect_driver, launch_devices, make_slab
from .device_sums import DeviceSums, device_memory
from .fingerprint import portable_bits
from .portable import count_changed, further_sums, portable_sums
from .sums import BASE, COLUMNS, INDEX, MEASURED_COLUMNS, statistics_of

BY_KERNEL = "Triton kernel"
"""The fastest way to measure; see `measured_by`."""

_Key = tuple[torch.device, torch.dtype | str]
_Result = TypeVar("_Result")
_TOLERANCE = 1e-6
_COMPARED = tuple(
    n for n, each in STATISTICS.items() if n not in ("numel", "inf_count") and set(each.needs) <= {MAGNITUDES}
)
_BINS = 7

_reasons: dict[_Key, str | None] = {}
"""Why the kernels are not used; None if they are used."""


def measure_on_device(
    flat: Tensor,
    terms: Sequence[Sum],
    zeros: int,
    row: Tensor | None,
    cast: TensorCast | None = None,
    *,
    with_bits: bool = False,
) -> DeviceSums:
    """Compute the sums of a vector on a device, real and contiguous; see `DeviceSums`. The result is in new memory without `row`.

    A kernel also computes the cast and the bits, usually in the same read; see `measure_by_kernel`.
    """
    sums = DeviceSums(device_memory(1, flat.device)[0] if row is None else row, flat.numel(), zeros, terms)
    others = [each for each in terms if each is not MAGNITUDES]

    def by_kernel(kernels: Any) -> Tensor:
        key = flat.device, f"{flat.dtype} casts"
        if cast is not None and key not in _reasons:
            _reasons[key] = _problem_of_casts(kernels, flat.device, flat.dtype)
        given = None if cast is None or _reasons[key] is not None else cast
        result: Tensor = kernels.measure_by_kernel(flat, sums.row[MEASURED_COLUMNS.start :], given, with_bits=with_bits)
        sums.has_bits = with_bits
        return result

    if _by_kernel(flat, by_kernel) is None:
        sums.row[MEASURED_COLUMNS] = portable_sums(flat)
        others = [*terms]
    if others:
        for each, number in zip(others, further_sums(flat, sums.row, others), strict=True):
            sums.row[INDEX[each.name]] = number
    return sums


def measure_batch(batch: bytes) -> None:
    """Write the numbers of the rows of a batch, with one launch for each device and dtype.

    Args:
        batch: What `Slab.end_batch` returns, int64 [tensors, 6]: device type, device id, kind of dtype, address of
            the elements, number of elements, and address of the results.
    """
    table = np.frombuffer(batch, np.int64).reshape(-1, 6)
    device_ids, kinds = table[:, 1], table[:, 2]
    for device_id, kind in dict.fromkeys(zip(device_ids.tolist(), kinds.tolist(), strict=True)):
        tensors = table[(device_ids == device_id) & (kinds == kind), 3:]
        device = next(each for each in launch_devices if (each.index or 0) == device_id)
        _kernels().measure_batch_by_kernel(device, DTYPE_OF_KIND[kind], tensors)


def histogram_on_device(flat: Tensor, bins: int) -> Tensor | None:
    """Return minimum, maximum, and the counts of a histogram of a vector on a device, [2 + bins]; None if the kernel is not used."""
    return _by_kernel(flat, lambda kernels: kernels.histogram_by_kernel(flat, bins))


def measured_by() -> dict[str, str]:
    """Return how the devices of this process measured, such as `{"cuda:0 float32": "Triton kernel"}`, for `run.json`.

    If the kernels were not used, the reason follows.
    """
    return {
        f"{device} {str(dtype).removeprefix('torch.')}": f"PyTorch operations: {reason}" if reason else BY_KERNEL
        for (device, dtype), reason in _reasons.items()
    }


def _by_kernel(flat: Tensor, run: Callable[[Any], _Result]) -> _Result | None:
    """Return the result of a kernel; None if it is not used. If it fails, note the reason."""
    key = flat.device, flat.dtype
    if _reasons.get(key) is not None or not _is_plain(flat):
        return None
    try:
        kernels = _kernels()
        if flat.dtype not in kernels.DTYPES:
            return None
        if key not in _reasons:
            _reasons[key] = _problem(kernels, *key)
            if _reasons[key] is not None:
                disconnect_driver()
        return run(kernels) if _reasons[key] is None else None
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # Triton's compiler can raise anything
        disconnect_driver()
        _reasons[key] = f"{type(error).__name__}: {first_line(error)}"
        return None


def _is_plain(flat: Tensor) -> bool:
    return type(flat) is Tensor and flat.is_cuda and flat.numel() > 0


@cache
def _kernels() -> Any:
    """Import the kernels. An error is raised if Triton is not installed, or only interprets them."""
    from . import device_kernel

    if os.environ.get("TRITON_INTERPRET") == "1":
        raise RuntimeError("TRITON_INTERPRET=1 runs kernels on the CPU")
    return device_kernel


def _problem(kernels: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return how the results of the kernels for known values differ from those on the CPU. Waits for the device."""
    # Every dtype represents these integers, and none is on an edge of the bins.
    integers = torch.arange(5000, device="cpu") % 61 - 20.0
    finite = integers.to(dtype)
    values = torch.cat([finite, torch.tensor([math.nan, math.inf, -math.inf], dtype=dtype, device="cpu")])

    def by_slab(flat: Tensor, results: Tensor) -> None:
        slab = make_slab(len(COLUMNS))
        slab.set_buffer(*results.__dlpack_device__(), results.data_ptr(), 1)
        slab.add(flat, 0, None, True)
        if not _has_launched(slab):
            kernels.measure_by_kernel(flat, results)

    def by_batch(flat: Tensor, results: Tensor) -> None:
        first = torch.empty_like(results)  # of a tensor with 7 elements, in the same launch
        numbers = [(flat.data_ptr(), count, each.data_ptr()) for count, each in ((7, first), (flat.numel(), results))]
        kernels.measure_batch_by_kernel(device, dtype, np.array(numbers, np.int64))

    for given in (finite, values):
        if (difference := _difference(given, device, kernels.measure_by_kernel)) is not None:
            return difference
    row = device_memory(1, device)[0, : INDEX["bits_high"]]
    bits = kernels.measure_by_kernel(values.to(device), row, with_bits=True)[len(BASE) - 1 :].tolist()
    if bits != (expected_bits := [float(half) for half in portable_bits(values)]):
        return f"the kernel returned the bits {bits} instead of {expected_bits}"
    counts = kernels.histogram_by_kernel(values.to(device), _BINS)[2:].tolist()
    expected_counts = np.histogram(integers.numpy(), _BINS)[0].tolist()
    if counts != expected_counts:
        return f"the kernel returned the counts {counts} instead of {expected_counts}"
    kernels.enable_launches(values.to(device))
    for measure in (by_slab, by_batch):
        for given in (finite, values):
            if (difference := _difference(given, device, measure)) is not None:
                return difference
    return _difference_of_effects(values, device)


def _problem_of_casts(kernels: Any, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return how the casts of known values by the kernel differ from those by operations on the CPU. Waits for the device."""
    shape = 2, 50, 33  # blocks of several sizes, which are not consecutive
    values = torch.linspace(0.2, 3.0, math.prod(shape), device="cpu").pow(7).to(dtype)
    row = device_memory(1, device)[0, MEASURED_COLUMNS.start :]
    expected_bits = [each.item() for each in portable_bits(values)]
    for name in ("float8_e4m3fn", "mxfp6_e3m2", "nvfp4"):
        cast, expected = (TensorCast(FORMATS[name], 0.7, *shape) for _ in range(2))
        bits = kernels.measure_by_kernel(values.to(device), row, cast, with_bits=True)[len(BASE) - 1 :][:2].tolist()
        assert cast.lost is not None, "the kernel sets it"
        for numbers, others in zip(cast.lost, lost_by_operations(values, expected), strict=True):
            count = SCALE if len(numbers) == NUMBERS else cast.blocks
            of_kernel, of_operations = (sorted(each[:count].tolist()) for each in (numbers, others))
            if not np.allclose(of_kernel, of_operations, _TOLERANCE, 0.0):
                return (
                    f"the kernel returned {of_kernel[:SCALE]} for the cast to {name} instead of {of_operations[:SCALE]}"
                )
        if bits != expected_bits:
            return f"the kernel returned the bits {bits} with the cast to {name} instead of {expected_bits}"
    return None


def _difference(values: Tensor, device: torch.device, measure: Callable[[Tensor, Tensor], object]) -> str | None:
    """Return how the sums of CPU values, measured on a device, differ from those by operations; None if they agree."""
    sums, row = device_memory(1, values.device), device_memory(1, device)
    sums[0, MEASURED_COLUMNS] = portable_sums(values)
    sums[0, INDEX[MAGNITUDES.name]] = further_sums(values, sums[0], [MAGNITUDES])[0]
    measure(values.to(device), row[0, MEASURED_COLUMNS])
    expected, numbers = (
        [column.item() for column in statistics_of(each.numpy(force=True), _COMPARED)] for each in (sums, row)
    )
    return _first_difference(_COMPARED, expected, numbers)


def _difference_of_effects(before: Tensor, device: torch.device) -> str | None:
    """Return how the effect of a change of CPU values, measured by a launch, differs from that on the CPU; None if they agree."""
    after = before.clamp(-5, 30)
    finite = (each[each.isfinite()].double() for each in (before, after))
    expected = [count_changed(before, after).item(), *(torch.linalg.vector_norm(each).item() for each in finite)]
    results = torch.full((1, len(expected)), math.nan, dtype=torch.float64, device=device)
    slab = make_slab(len(COLUMNS))
    slab.set_buffer(*results.__dlpack_device__(), results.data_ptr(), 1)
    slab.add_effect(before.to(device), after.to(device), 0, None, None, None)
    if not _has_launched(slab):
        return None
    return _first_difference(("changed", "norm_before", "norm_after"), expected, results[0].tolist())


def _first_difference(names: Sequence[str], expected: Sequence[float], numbers: Sequence[float]) -> str | None:
    for name, wanted, number in zip(names, expected, numbers, strict=True):
        if not np.isclose(number, wanted, rtol=_TOLERANCE):
            return f"the kernel returned {name} {number} instead of {wanted}"
    return None


def _has_launched(slab: Slab) -> bool:
    """Return whether a slab has launched a kernel for its only row, which is removed."""
    keys = np.frombuffer(slab.take()[1], np.int64)
    return len(keys) > 0 and bool(keys[-1] >= 0)
