"""Writing of recorded tensors: by the hook, or copied by the hook and written by a thread.

Tensors that are stored as bytes go to block files (`instrument.storage.blocks`), and only their places to the journal. The hook writes
those in CPU memory itself, which takes half of the processor time of a copy that a thread writes. Tensors on a GPU, lists of float32,
and everything that follows them go to the thread, and training continues while it writes. `end_step` waits for the thread, so that a
completed step is never only in memory. It does not wait for a GPU: the thread receives a tensor when its copy is complete.

Lists go to the journal if a step has few. If it has many, the thread writes a part directly, since writing them twice would halve
the speed.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from ..runtime.deferred_interrupts import uninterrupted
from ..stats.device_copy import HostCopy, bytes_of, is_plain
from ..tables.message_template import Message, MessageTemplate
from ..tables.schemas import TABLES
from ..tables.sink_interface import Row
from ..values.int8_rows import NAME, int8_rows
from .blocks import BLOCK_BYTES, NO_PLACE, BlockWriter, binary_of
from .parts import ROW_GROUP_BYTES
from .row_batches import as_table
from .table_writer import TableWriter

POOL_BYTES = 256 * 2**20
CHECK_SECONDS = 0.5  # seconds between two checks while waiting for a buffer

# Dtypes that float32 represents exactly. All others are stored as bytes.
FITS_FLOAT32 = (
    *(torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16),
    *(torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
)


class Pool:
    """Byte buffers with a limit on their total size.

    A tensor larger than the limit gets a buffer as soon as no other one is in use. PyTorch keeps pinned memory for later buffers.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._lock = threading.Lock()  # a signal cannot arrive between the acquisition of a plain lock and its block
        self._changed = threading.Condition(self._lock)

    def take(self, size: int, *, pinned: bool, wait: Callable[[], None] | None) -> Tensor | None:
        """Return a buffer of `size` bytes, dtype uint8.

        Until one is available, `wait` is called repeatedly, and may raise an exception. Without `wait`, the result is then None.
        """
        with self._lock:
            while self.used and self.used + size > self.limit:
                if wait is None:
                    return None
                wait()
                self._changed.wait(CHECK_SECONDS)
            self.used += size
        with torch.inference_mode(False):
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def release(self, buffer: Tensor) -> None:
        """Return a buffer to the pool."""
        with self._lock:
            self.used -= buffer.numel()
            self._changed.notify_all()


class CopiedTensor(NamedTuple):
    """A tensor that was copied into a buffer of the pool."""

    row: Row  # the columns before the place
    flat: Tensor  # the elements, on the CPU: float32 for `values`, any dtype for a block file
    as_list: bool  # whether it is stored in `values`
    buffer: Tensor
    copy: HostCopy


class TensorWriter:
    """Copies tensors and writes them in a thread. The options are those of `instrument.storage.parquet.ParquetSink`.

    All methods raise an OSError if the thread could not write.
    """

    def __init__(
        self, writer: TableWriter, *, tensors: Literal["list", "bytes"] | None, when_full: Literal["wait", "drop"]
    ) -> None:
        self.writer = writer
        self.tensors = tensors
        self.waits = when_full == "wait"
        self.pool = Pool(POOL_BYTES)
        self.error: BaseException | None = None
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._copying: deque[CopiedTensor] = deque()  # in the order of the hooks
        self._passing = threading.Lock()  # hooks of several GPUs run in several threads
        # The following attributes belong to the thread once it has started.
        self._pending: list[tuple[Row, Tensor | None, bool]] = []  # see `rows_of`
        self._buffers: list[Tensor] = []  # with the elements of pending rows
        self._template = MessageTemplate(TABLES["tensors"].plain_schema)
        self._pending_bytes = 0
        self._block: BlockWriter | None = None
        self._part: pq.ParquetWriter | None = None
        self._end_of_part = ExitStack()

    def keep(self, key: Row, source_shape: Sequence[int], tensor: Tensor, dtype: torch.dtype | None) -> int | None:
        """Write a tensor, or copy it and pass it to the thread. Return the number of stored bytes; None if the tensor was dropped."""
        self.check()
        as_list = self.tensors == "list" or (self.tensors is None and dtype is None)
        shape, name = list(tensor.shape), None
        if dtype == torch.int8 and tensor.is_floating_point():
            tensor, name, as_list = int8_rows(tensor), NAME, False
        elif dtype is not None and dtype != tensor.dtype:
            tensor = tensor.to(dtype)
        as_list = as_list and tensor.dtype in FITS_FLOAT32
        stored = torch.float32 if as_list else tensor.dtype
        size = tensor.numel() * stored.itemsize
        row = (*key, name or str(tensor.dtype).removeprefix("torch."), shape, list(source_shape))
        if not as_list and not tensor.is_cuda and self.waits:
            with self._passing:
                if self._thread is None and not self._copying:
                    self._append(row, tensor if is_plain(tensor) else HostCopy(tensor).memory)
                    return size
        self._pass_on()
        buffer = self.pool.take(size, pinned=tensor.is_cuda, wait=self._write_now if self.waits else None)
        if buffer is None:
            return None
        flat = buffer.view(stored)
        copy = HostCopy(tensor, flat.view(tensor.shape), in_background=True)
        self._copying.append(CopiedTensor(row, flat, as_list, buffer, copy))
        return size

    def _pass_on(self, *, wait: bool = False) -> None:
        """Pass the tensors whose copies are complete to the thread, in order. An `OSError` is raised if a GPU could not copy one."""
        with self._passing:
            try:
                while self._copying and (wait or self._copying[0].copy.is_complete):
                    self._copying[0].copy.wait()
                    self._submit(partial(self._receive, self._copying.popleft()))
            except RuntimeError as error:
                raise OSError(f"the GPU could not copy a recorded tensor: {error}") from error

    def end_step(self, *, wait: bool = False) -> None:
        """Wait until all tensors are written; without `wait`, except those that a GPU is still copying."""
        if self._copying:
            self._pass_on(wait=wait)
        if self._thread is not None:
            written = threading.Event()
            self._submit(self._end_step)
            self._submit(written.set)
            while not written.wait(CHECK_SECONDS):
                self.check()
        elif self._pending:
            self._end_step()

    def stop(self) -> None:
        """Stop the thread after it has completed its orders."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None
        if self._block is not None:
            self._block.close()
            self._block = None

    def check(self) -> None:
        """Raise the exception of the thread, if there is one, as an OSError."""
        if self.error is not None:
            problem = f"{type(self.error).__name__}: {self.error}"
            raise self.error if isinstance(self.error, OSError) else OSError(f"the tensor writer failed: {problem}")

    def _write_now(self) -> None:
        self.check()
        self._pass_on(wait=True)
        self._submit(self._write_group)

    def _submit(self, task: Callable[[], None]) -> None:
        if self._thread is None:
            with uninterrupted():
                self._thread = threading.Thread(target=self._work, name="instrument-tensors", daemon=True)
                self._thread.start()
        self._tasks.put(task)

    # The methods below run in the thread, if it has started.

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            if self.error is None:
                try:
                    task()
                except BaseException as error:
                    self.error = error
                    with suppress(BaseException):  # removes the incomplete part and raises the error again
                        self._end_of_part.__exit__(type(error), error, error.__traceback__)

    def _receive(self, copied: CopiedTensor) -> None:
        if not copied.as_list:
            self._append(copied.row, copied.flat)
            self.pool.release(copied.buffer)
            return
        self._pending.append(((*copied.row, *NO_PLACE), copied.flat, True))
        self._buffers.append(copied.buffer)
        self._pending_bytes += copied.flat.nbytes
        if self._pending_bytes >= ROW_GROUP_BYTES:
            self._write_group()

    def _append(self, row: Row, tensor: Tensor) -> None:
        """Write a tensor to the block file of the current part. Rows in the same or in later parts refer to it."""
        part = self.writer.part
        if self._block is None or self._block.number != part.number:
            self._end_block()
            self._block = BlockWriter(self.writer.folder, part, fsync=self.writer.fsync)
        self._pending.append(((*row, *self._block.append(bytes_of(tensor))), None, False))

    def _end_block(self) -> None:
        if self._block is not None:
            self._block.end_step()
            self._block.close()
            self._block = None

    def _write_group(self) -> None:
        if self._pending:
            if self._part is None:
                self._part = self._end_of_part.enter_context(self.writer.new_part())
            self._part.write_table(as_table(self.writer.table, rows_of(self._pending)))
            self._release_buffers()

    def _end_step(self) -> None:
        if self._block is not None and self._pending:
            self._block.end_step()
        if self._part is not None:
            self._write_group()
            self._part = None
            self._end_of_part.close()
        elif self._pending:
            self.writer.append(self._message())
            self._release_buffers()
        if self._block is not None and self._block.size >= BLOCK_BYTES:
            self.writer.finish_part()
            self._end_block()

    def _message(self) -> pa.RecordBatch | Message:
        if self._buffers:
            return rows_of(self._pending).combine_chunks().to_batches()[0]
        return self._template.message_of([(*row, None, None) for row, *_ in self._pending])

    def _release_buffers(self) -> None:
        for buffer in self._buffers:
            self.pool.release(buffer)
        self._pending, self._buffers, self._pending_bytes = [], [], 0


def rows_of(tensors: Iterable[tuple[Row, Tensor | None, bool]]) -> pa.Table:
    """Return plain rows of the `tensors` table. Their values share the memory of the tensors.

    Each tensor has the columns before the values, its elements on the CPU (a vector; None in a block file), and whether they
    are stored in `values`, as float32, or in `data`, as any dtype.
    """
    table = TABLES["tensors"]
    rows, flat, as_list = zip(*tensors, strict=True)
    columns = pa.array(rows, _KEYS).flatten()
    values = [
        pa.ListArray.from_arrays(np.array([0, each.numel()], np.int32), each.numpy()) if in_list else _NO_LIST
        for each, in_list in zip(flat, as_list, strict=True)
    ]
    data = [
        _NO_BYTES if in_list or each is None else binary_of(bytes_of(each))
        for each, in_list in zip(flat, as_list, strict=True)
    ]
    return pa.Table.from_arrays([*columns, pa.chunked_array(values), pa.chunked_array(data)], schema=table.plain_schema)


_KEYS = pa.struct(list(TABLES["tensors"].plain_schema)[:-2])  # all columns except `values` and `data`
_NO_LIST = pa.nulls(1, pa.list_(pa.float32()))
_NO_BYTES = pa.nulls(1, pa.large_binary())
