"""The compiled kernel `native.c`, which reads a CPU tensor once, and the slab that it fills.

Sums are computed in double precision. A second pass, with the mean subtracted first, is only required if the mean is so
far from zero that the variance loses precision. Without the kernel, `instrument.stats.portable` measures all tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.parameter import Parameter

from .cast_operations import NUMBERS, TensorCast

try:
    from . import native
# Installed without a C compiler.
except ImportError:
    native = None  # type: ignore[assignment]

KERNEL = "portable" if native is None else "native"
"""The kernel that measures CPU tensors, for run.json."""

_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float64: 2, torch.float16: 3}
_FLOAT16 = _KINDS[torch.float16]  # on the CPU, only its sums are computed
DTYPE_OF_KIND = {kind: dtype for dtype, kind in _KINDS.items()}
"""The dtypes by their number in the kernel."""
_NO_SHAPE = -1

# PyTorch describes its tensors to C code by DLPack's exchange API.
is_connected = native is not None and native.connect(Tensor, Parameter, Tensor.__dlpack_c_exchange_api__)
"""Whether the kernel can read tensors. Without it, no tensor is plain."""


class Slab:
    """The rows of a step: for each tensor a slot and a moment, its shape, and `width` numbers. Several threads may add rows.

    The class of the compiled kernel has the same methods. Without the kernel, this one is used: no tensor is plain.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._rows: list[tuple[bytes, int, object, Sequence[int] | None]] = []

    def add(self, tensor: Tensor, slot: int, moment: object, further: int) -> bool:  # noqa: ARG002
        """Add the sums of a plain tensor, the first of `instrument.stats.sums.COLUMNS`; the other columns are NaN.

        Plain tensors are those of class `Tensor` or `Parameter` on the CPU with dtype float32, bfloat16, float16 or float64, at
        least two elements, and elements in a contiguous block in any order of the dimensions. On a device, their dtype and the
        current stream have a launcher, their address is divisible by 16, and the buffer has a free row, to which the device
        writes the sums.

        Args:
            slot: The identity of the row.
            moment: The time of the row: any object.
            further: 1 if the sum of magnitudes is requested, which requires a second read on the CPU, plus 2 for the sums of
                `instrument.stats.fingerprint`. These require a contiguous tensor.

        Returns:
            Whether the row was added. False if the tensor is not plain, its squares overflow or underflow, or the kernel or
            PyTorch's exchange API is missing.
        """
        return False

    def add_effect(
        self, before: Tensor, after: Tensor, slot: int, moment: object, factor: float | None, held: bool | None
    ) -> int | None:
        """Add the effect of an intervention, in the order of `instrument.actions.base.EFFECT`.

        Returns:
            The index of the row. None if the tensors are not plain, differ in shape, dtype or strides, or are float16 on the CPU.
        """

    def set_buffer(self, device_type: int, device_id: int, address: int, rows: int) -> None:
        """Set a buffer on a device, to which launched kernels write until the next `take`; see `add_launcher`.

        Args:
            device_type, device_id: `__dlpack_device__` of a tensor on the device.
            address: The address of the buffer: float64 [rows, 11], or [rows, 3] for `add_effect`.

        Raises:
            ValueError: There are more than 64 buffers.
        """

    def begin_batch(self) -> None:
        """Let `add` collect its launches in this thread instead of making them, until `end_batch`.

        The tensors must not be changed or freed until the launches that `end_batch` returns are made.
        """

    def end_batch(self) -> bytes:
        """Return the collected launches; see `instrument.stats.device_choice.measure_batch`."""
        return b""

    def append(self, numbers: bytes, slot: int, moment: object, shape: Sequence[int] | None) -> int:
        """Add a row with the given numbers, the memory of a float64 array. Return its index among the rows."""
        self._rows.append((numbers, slot, moment, shape))
        return len(self._rows) - 1

    def take(self) -> tuple[bytearray, bytes, bytes, list[Any]]:
        """Remove all rows.

        Returns:
            The numbers, float64 [rows, width]; int64 [rows, 5] with the slot, the index of the moment, the number of dimensions
            (-1 without a shape), the index of the buffer with the numbers, and the row there (both -1 on the host);
            the dimensions of all rows, int64; the moments, in which neighbours may be equal.
        """
        rows, self._rows = self._rows, []
        matrix = np.full((len(rows), self._width), np.nan)
        for row, (numbers, *_) in zip(matrix, rows, strict=True):
            row[: len(numbers) // row.itemsize] = np.frombuffer(numbers)
        shapes = [shape for *_, shape in rows]
        ranks = [_NO_SHAPE if shape is None else len(shape) for shape in shapes]
        keys = np.array(
            [(row[1], at, rank, -1, -1) for at, (row, rank) in enumerate(zip(rows, ranks, strict=True))], np.int64
        )
        dims = np.array([size for shape in shapes for size in shape or ()], np.int64)
        return bytearray(matrix.tobytes()), keys.tobytes(), dims.tobytes(), [moment for _, _, moment, _ in rows]

    def __len__(self) -> int:
        return len(self._rows)


make_slab: Callable[[int], Slab] = native.Slab if is_connected else Slab


def connect_driver(functions: tuple[int, int, int], elements: int) -> None:
    """Give slabs access to the driver of devices. Removes all launchers.

    Args:
        functions: The addresses of `cuLaunchKernel`, `cuStreamIsCapturing` and `cuCtxGetDevice`.
        elements: The number of elements per program, up to the maximum number of programs of a launcher.
    """
    if is_connected:
        native.connect_driver(*functions, elements)


def disconnect_driver() -> None:
    """Remove the launchers of all devices and dtypes, until the process ends."""
    connect_driver((0, 0, 0), 1)
    launch_devices.clear()


launch_devices: dict[torch.device, bool] = {}
"""The devices with a launcher, in the order in which the first one was added."""


def add_launcher(  # noqa: PLR0917
    device: torch.device,
    dtype: torch.dtype,
    stream: int,
    kernel: int,
    function: int,
    size: tuple[int, int],
    memory: tuple[Tensor, Tensor],
) -> None:
    """Let slabs launch a kernel for tensors of a dtype on a stream.

    Args:
        kernel: 1 for `instrument.stats.device_kernel._measure`, 2 for `_compare`, 3 for `_measure` with bits.
        function: The handle of the kernel, compiled for addresses divisible by 16.
        size: Threads per program, and bytes of shared memory per program.
        memory: Memory of the stream, which must outlive the launcher: partial results, float64 [programs, 15] for the
            maximum number of programs of a launch, and a counter, int32 [1].
    """
    if is_connected:
        number = memory[0].__dlpack_device__()
        addresses = [tensor.data_ptr() for tensor in memory]
        given = (*number, stream, _KINDS[dtype], kernel, function, len(memory[0]), *size, *addresses)
        if native.add_launcher(*given):
            launch_devices[device] = True


def kernel_sums(
    flat: Tensor, further: int = 0, cast: TensorCast | None = None
) -> np.ndarray[Any, np.dtype[np.float64]] | None:
    """Compute the sums of a CPU tensor of any shape and dtype whose elements are a contiguous block in any order.

    Args:
        further: See `Slab.add`.
        cast: A cast to compute in the same read, piece by piece. It receives what is lost. The sums do not depend on it.

    Returns:
        float64, without the form, the first of `instrument.stats.sums.COLUMNS`. None if the kernel is missing, does not support the dtype,
        squares overflow or underflow, or the tensor has no memory: the gradient of `sgn` is a zero tensor of this kind.
    """
    kind = _KINDS.get(flat.dtype)
    if native is None or kind is None or flat._is_zerotensor():
        return None
    given: tuple[tuple[float, ...], ...] = ()
    if cast is not None:
        cast.lost = torch.empty(NUMBERS, dtype=torch.float64), torch.empty(cast.blocks, dtype=torch.float64)
        given = ((cast.length, cast.inner, float(cast.scale), *(each.data_ptr() for each in cast.lost), *cast.form),)
    numbers = native.sums(flat.data_ptr(), flat.numel(), kind, further, *given)
    return None if numbers is None else np.frombuffer(numbers)


def kernel_bits(stored: Tensor) -> int | None:
    """Return the sum over the tiles of a contiguous CPU tensor, from 0 to 2^64 - 1; see `instrument.stats.fingerprint`.

    None if the kernel is missing, or the tensor has no memory.
    """
    if native is None or stored._is_zerotensor():
        return None
    return native.bits(stored.data_ptr(), stored.nbytes, stored.element_size())


def _unsupported(*arguments: object) -> None:
    """Replace a function of the native kernel if the kernel or PyTorch's exchange API is missing."""


effect_of_plain: Callable[[Tensor, Tensor], list[float] | None] = native.effect if is_connected else _unsupported
"""Compare two plain tensors of the same shape, dtype and strides; see `Slab.add`.

Returns:
    The number of elements that differ, where two NaN are equal, and the L2 norms of both over their finite elements (NaN
    without any). None if the tensors are not supported.
"""

effect_of_clip: Callable[[Tensor, float | None, float | None], tuple[bool, list[float]] | None] = (
    native.effect_of_clip if is_connected else _unsupported
)
"""Compare a plain tensor with its elements clamped to [low, high]; see `Slab.add`.

Args:
    tensor: Any tensor.
    low: The lower bound, for bfloat16 a number of this dtype; None for no bound.
    high: The upper bound, likewise.

Returns:
    Whether all elements are finite and none equals a bound in the tensor's dtype, and the result of `effect_of_plain` for
    both tensors. None if the tensor is not supported, or if low exceeds high.
"""


def add_to_bins(vector: Tensor, low: float, high: float, counts: np.ndarray[Any, np.dtype[np.int64]]) -> bool:
    """Count the elements of a CPU vector between `low` and `high` in equal-width bins.

    The counts are added to `counts`, contiguous [bins]. The vector is contiguous, [elements].

    Returns:
        Whether the elements were counted. False if the kernel is missing or does not support the dtype.
    """
    kind = _KINDS.get(vector.dtype)
    if native is None or kind in (None, _FLOAT16) or vector._is_zerotensor():
        return False
    native.histogram(vector.data_ptr(), vector.numel(), kind, low, high, len(counts), counts.ctypes.data)
    return True
