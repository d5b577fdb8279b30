"""Asynchronous copies from a device to the host.

Numbers are copied when a step ends and read when the next step ends. The device has completed the copy by then, so the
host does not wait. Recorded tensors are copied on a stream of their own, so that the device computes meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

_HOST = torch.device("cpu")
LARGE = 2**17  # bytes from which PyTorch copies with several threads


class HostCopy:
    """A copy of a tensor in CPU memory. A CUDA device may not have completed it yet.

    Args:
        tensor: Strided, on any device.
        memory: Strided CPU memory of the same shape, pinned if the tensor is on a CUDA device. Its dtype is the dtype
            of the copy. Default: new memory, with the dtype of the tensor.
        in_background: Whether a CUDA device copies it on a stream of its own. Later operations on the tensor do not wait for the copy,
            since it is made of a copy on the device. Without memory for that, the current stream copies.
    """

    def __init__(self, tensor: Tensor, memory: Tensor | None = None, *, in_background: bool = False) -> None:
        if memory is None:
            memory = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)
        self.memory = memory  # a device may still write to it; see `wait`
        self._copied: torch.cuda.Event | None = None
        given = tensor = tensor.detach()
        if not tensor.is_cuda:
            _copy_on_host(tensor, memory)
            return
        # A copy that also converts the dtype would wait, and a copy without waiting ignores conjugation.
        tensor = tensor.resolve_conj().resolve_neg().to(memory.dtype)
        stream = torch.cuda.current_stream(tensor.device)
        if in_background:
            current, background = stream, _background_stream(tensor.device)
            if (staged := _staged(tensor, given)) is not None:
                tensor, stream = staged, background
                stream.wait_stream(current)
                tensor.record_stream(stream)  # the memory is not reused before the copy is complete
            else:
                current.wait_stream(background)  # which may still write to this memory
        with torch.cuda.stream(stream):
            memory.copy_(tensor, non_blocking=True)
        self._copied = stream.record_event()

    @property
    def is_complete(self) -> bool:
        """Whether the copy can be read without waiting."""
        return self._copied is None or self._copied.query()

    def wait(self) -> Tensor:
        """Return the copy, once it is complete."""
        if self._copied is not None:
            self._copied.synchronize()
        return self.memory


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is a contiguous tensor on the CPU, without lazy negation or conjugation."""
    is_plain_class = type(tensor) in (Tensor, torch.nn.Parameter)
    return (
        is_plain_class and tensor.device == _HOST and tensor.is_contiguous() and not tensor.is_neg() | tensor.is_conj()
    )


def bytes_of(tensor: Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Return the bytes of a plain tensor, without a copy."""
    content: np.ndarray[Any, np.dtype[np.uint8]] = tensor.detach().view(-1).view(torch.uint8).numpy()
    return content


def _copy_on_host(tensor: Tensor, memory: Tensor) -> None:
    """Copy a tensor to CPU memory. A large one is copied by one thread, as fast as the memory allows: PyTorch's threads would wait for
    each other while all cores are busy.
    """
    if tensor.dtype == memory.dtype and tensor.nbytes >= LARGE and is_plain(tensor) and memory.is_contiguous():
        np.copyto(bytes_of(memory), bytes_of(tensor))
    else:
        memory.copy_(tensor)


def _staged(tensor: Tensor, given: Tensor) -> Tensor | None:
    """Return a contiguous tensor with the values of a tensor in other memory than a given one; None without memory for it."""
    try:
        contiguous = tensor.contiguous()
        return contiguous.clone() if contiguous.data_ptr() == given.data_ptr() else contiguous
    except torch.OutOfMemoryError:
        return None


@cache
def _background_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream on which a device copies recorded tensors."""
    return torch.cuda.Stream(device)


class Transfer:
    """Copies the numbers of many small tensors, with one copy per device and dtype.

    Args:
        devices: CUDA devices whose earlier copies of recorded tensors are part of the transfer.
    """

    def __init__(self, tensors: Sequence[Tensor], devices: Iterable[torch.device] = ()) -> None:
        self.devices = tuple(devices)
        self._events = [
            stream.record_event()
            for device in self.devices
            for stream in (torch.cuda.current_stream(device), _background_stream(device))
        ]
        self._layout = [((tensor.device, tensor.dtype), tensor.numel()) for tensor in tensors]
        self._copies: dict[tuple[torch.device, torch.dtype], Tensor | HostCopy] = {}
        for key in dict.fromkeys(key for key, _ in self._layout):
            flat = [
                tensor.detach().reshape(-1)
                for tensor, (own_key, _) in zip(tensors, self._layout, strict=True)
                if own_key == key
            ]
            vector = torch.cat(flat)
            self._copies[key] = HostCopy(vector) if vector.is_cuda else vector

    @property
    def is_complete(self) -> bool:
        """Whether everything can be read without waiting, because it was in CPU memory."""
        return not self._events and all(device.type == "cpu" for device, _ in self._copies)

    def read(self) -> Iterator[list[float]]:
        """Return an iterator over the numbers of each tensor in order. This waits for copies that are not complete."""
        for event in self._events:
            event.synchronize()
        return self._numbers()

    def _numbers(self) -> Iterator[list[float]]:
        copies = {key: copy.wait() if isinstance(copy, HostCopy) else copy for key, copy in self._copies.items()}
        numbers: dict[Any, list[float]] = {key: vector.tolist() for key, vector in copies.items()}
        offsets = dict.fromkeys(numbers, 0)
        for key, count in self._layout:
            start = offsets[key]
            offsets[key] += count
            yield numbers[key][start : offsets[key]]


class PendingMetrics(Mapping[str, float | None]):
    """A row of metrics, of which those with a name in `copied` are tensors that are being copied. Reading it waits for the copy."""

    def __init__(self, row: Mapping[str, Any], copied: Sequence[str]) -> None:
        self._row, self._copied = row, copied
        self.transfer = Transfer([row[name] for name in copied])

    @cached_property
    def row(self) -> dict[str, Any]:
        numbers = (number for (number,) in self.transfer.read())
        return {**self._row, **dict(zip(self._copied, numbers, strict=True))}

    def __getitem__(self, name: str) -> float | None:
        value: float | None = self.row[name]
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self.row)

    def __len__(self) -> int:
        return len(self.row)
