"""Block files: the bytes of recorded tensors, one after the other. The table `tensors` has their places.

    blocks/block-0000-000003.raw    rank, and the number of the part whose rows were written next

A block file only grows. A row is written after its bytes, so that all places in the index can be read: while the run is in
progress, and after its process was killed. Bytes without a row belong to a step that was not completed. Each row has a
checksum of its bytes. A tensor begins at a multiple of 64 bytes, as vector instructions and mapped memory need.
"""

from __future__ import annotations

import mmap
import os
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import CDLL, c_int64
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import pyarrow as pa

from .checksums import DamagedFileError, remote_errors
from .parts import Part
from .remote_folder import is_address

try:
    from ..stats import native
# Installed without a C compiler.
except ImportError:
    native = None  # type: ignore[assignment]

BLOCK_BYTES = 256 * 2**20  # The size at which a block file ends, at the end of a step.
READING_THREADS = 2  # One thread does not use the whole speed of the memory, and waits for the disk.
READING_TASKS = 32  # The parts of a list of tensors, of which each thread takes the next one when it has read one.
ALIGNMENT = 64
PAGE = 4096
ALLOCATED_BYTES = 16 * 2**20  # The disk space after the end of a block file; at most as much as the file has.
MAPPED_FILES = 128  # The block files that one reader maps at the same time.
Bytes = np.ndarray[Any, np.dtype[np.uint8]]
T = TypeVar("T")
_fallocate = getattr(CDLL(None), "fallocate", None)  # a function of Linux
_KEEP_SIZE = 1


class Place(NamedTuple):
    """Where the bytes of a tensor are: columns of the table `tensors`, next to the rank."""

    block: int
    offset: int
    size: int
    checksum: int


NO_PLACE = (None,) * len(Place._fields)
"""The columns of the place of a tensor that is not in a block file."""


def checksum_of(content: Bytes) -> int:
    """Return the CRC-32 of the sums of each 4 KB, followed by the other bytes. A sum is that of little-endian 64-bit words, modulo 2^64.

    It takes a quarter of the time of the CRC-32 of all bytes, and finds every change of one word and every exchange of pages.
    """
    end = content.nbytes // PAGE * PAGE
    sums = content[:end].view("<u8").reshape(-1, PAGE // 8).sum(axis=1)
    return zlib.crc32(content[end:].data, zlib.crc32(sums.data))


def copy_rows(content: Bytes, rows: np.ndarray[Any, Any], indices: np.ndarray[Any, np.dtype[np.int64]]) -> int:
    """Copy the bytes of the rows of a tensor to rows of an array, except for negative indices. Return their checksum.

    The kernel reads the bytes once, and writes past the cache.
    """
    values = content.view(rows.dtype).reshape(len(indices), *rows.shape[1:])
    indices = np.ascontiguousarray(indices, np.int64)
    is_safe = rows.flags.writeable and rows[:1].flags.c_contiguous and indices.max(initial=-1) < len(rows)
    if native is None or not content.nbytes or not is_safe:
        kept = indices >= 0
        rows[indices[kept]] = values[kept]
        return checksum_of(content)
    sums = np.empty(content.nbytes // PAGE, np.uint64)
    source, target = (content.ctypes.data, content.nbytes, values.strides[0]), (rows.ctypes.data, rows.strides[0])
    native.copy_rows(*source, *target, indices.ctypes.data, sums.ctypes.data)
    return zlib.crc32(content[len(sums) * PAGE :].data, zlib.crc32(sums.data))


def read_in_threads(
    read: Callable[..., T], calls: Sequence[tuple[Any, ...]], threads: int = READING_THREADS
) -> list[T]:
    """Return the results of calls of a function that reads tensors. After an error, no thread begins another part of the calls."""
    size = -(-len(calls) // READING_TASKS) or 1
    with ThreadPoolExecutor(threads) as pool:
        tasks = (calls[start : start + size] for start in range(0, len(calls), size))
        results = pool.map(lambda task: [read(*call) for call in task], tasks)
        return [result for part in results for result in part]


def binary_of(content: Bytes) -> pa.Array:
    """Return an array of large_binary with one cell that shares the memory."""
    ends = pa.py_buffer(np.array([0, content.nbytes], np.int64))
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, ends, pa.py_buffer(content)])


class BlockWriter:
    """Appends tensors to a new block file. An `OSError` is raised if it cannot be written.

    Disk space is allocated ahead of the end of the file, which saves a third of the time of a write.
    """

    def __init__(self, folder: Path, part: Part, *, fsync: bool) -> None:
        self.number = part.number
        self.size = self._allocated = 0
        self._fsync = fsync
        path = part.block(folder)
        path.parent.mkdir(exist_ok=True)
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115

    def append(self, content: Bytes) -> Place:
        """Write the bytes of a tensor."""
        place = Place(self.number, -(-self.size // ALIGNMENT) * ALIGNMENT, content.nbytes, checksum_of(content))
        file, end = self._file.fileno(), place.offset + place.size
        if end > self._allocated and _fallocate is not None:
            self._allocated = end + min(end, ALLOCATED_BYTES)
            if _fallocate(file, _KEEP_SIZE, c_int64(self.size), c_int64(self._allocated - self.size)):
                self._file.truncate(self.size)  # a full disk may have allocated all that was left
        left = content.data
        while len(left):
            left = left[os.pwrite(file, left, end - len(left)) :]
        self.size = end
        return place

    def end_step(self) -> None:
        """Make sure that the rows of the step can be written."""
        if self._fsync:
            os.fsync(self._file.fileno())
        if not os.fstat(self._file.fileno()).st_nlink:
            raise FileNotFoundError(f"{self._file.name} was removed while it was being written")

    def close(self) -> None:
        """Close the file, and release the disk space after its end."""
        self._file.truncate(self.size)
        self._file.close()


class BlockReader:
    """Reads places in the block files of a run. Those of a local run are mapped into memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._maps: OrderedDict[tuple[int, int], tuple[mmap.mmap, Bytes]] = OrderedDict()  # by rank and number

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "_maps": OrderedDict()}

    def read(
        self,
        rank: int,
        place: Place,
        start: int = 0,
        end: int | None = None,
        *,
        verified: bool = False,
        checksum: Callable[[Bytes], int] = checksum_of,
    ) -> Bytes:
        """Return the bytes of a tensor, or some of them, as a view of the file. Changes of the view do not reach the file.

        Args:
            verified: Whether they are known to match the checksum. Otherwise all bytes are compared with it, but not some of them.
            checksum: A function that returns the checksum of the bytes. It may also copy them.

        Raises:
            DamagedFileError: The file ends before, or all bytes were read and do not match the checksum.
            FileNotFoundError: The file does not exist.
        """
        end = place.size if end is None else end
        content = self._bytes(rank, place.block, place.offset + start, place.offset + end)
        if len(content) < end - start:
            raise DamagedFileError(f"block-{Part(rank, place.block).name}.raw ends before byte {place.offset + end:,}")
        if end - start == place.size and not verified and checksum(content) != place.checksum:
            where = f"bytes {place.offset:,} to {place.offset + place.size:,}"
            raise DamagedFileError(f"{where} of block-{Part(rank, place.block).name}.raw do not match their checksum")
        return content

    def release(self) -> None:
        """Remove what was read from the memory of this process. Views remain valid, and read it again."""
        for mapped, _ in list(self._maps.values()):
            mapped.madvise(mmap.MADV_DONTNEED)

    def _bytes(self, rank: int, number: int, start: int, end: int) -> Bytes:
        if start == end:
            return np.empty(0, np.uint8)
        mapped = self._maps.pop((rank, number), None)
        if mapped is None or len(mapped[1]) < end:  # the file has grown
            file = Part(rank, number).block(self.folder)
            if is_address(self.folder):
                with remote_errors(file):
                    content = cast(Any, file).fs.cat_file(file.path, start=start, end=end)  # type: ignore[attr-defined]
                return np.frombuffer(bytearray(content), np.uint8)
            with open(file, "rb") as opened:
                size = os.fstat(opened.fileno()).st_size
                if not size:
                    return np.empty(0, np.uint8)
                memory = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_COPY)
                mapped = memory, np.frombuffer(memory, np.uint8)
        self._maps[rank, number] = mapped
        if len(self._maps) > MAPPED_FILES:
            self._maps.popitem(last=False)  # unmapped when no view of it is left
        return mapped[1][start:end]
