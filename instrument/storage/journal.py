"""The journal: a file of Arrow messages with rows that are not in a Parquet file yet.

When `append` returns, the operating system has the data, which survives the end of the process. The rows of one step
and table are one message. A schema precedes the first rows, and rows with other columns than those before. A reader sees complete
messages and possibly an incomplete last one.

Each message has checksums in the padding between its metadata and its body, which Arrow skips:

    FFFFFFFF | size of metadata and checksums | metadata | MAGIC, size and CRC-32 of the body | CRC-32 of all before | body

So a damaged message is an error, and it is not mistaken for an incomplete one.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from ..tables.message_template import CHECKS_BYTES, PREFIX_BYTES, Message, size_of_metadata, with_room
from .checksums import REMEDY

SUFFIX = ".arrows"
MAGIC = b"INSTRROW"
CHECKS = struct.Struct("<8sQI")  # MAGIC, size of the body, CRC-32 of the body; followed by the CRC-32 of all before
STACK_BYTES = 2**20  # of messages whose rows become one batch
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]
STREAM_MAGIC = b"\xff\xff\xff\xff"  # The first bytes of every message of an Arrow stream.


class Journal:
    """A growing file of record batches.

    Args:
        path: The file. It must not exist.
        schema: The columns of the first rows. Before rows with other columns, the file has their schema.
        fsync: Whether rows survive a power failure, in addition to the end of the process.

    Raises:
        OSError: From the constructor and `append`: the file cannot be written, or it was removed.
    """

    def __init__(self, path: Path, schema: pa.Schema, *, fsync: bool = False) -> None:
        self.path = path
        self.rows = 0
        self.size = 0
        self._schema = schema
        self._fsync = fsync
        # In append mode: the position is always the end of the file, so that truncation by another process shows in its
        # size.
        self._file = open(path, "xb", buffering=0, opener=lambda path, flags: os.open(path, flags | os.O_APPEND, 0o666))  # noqa: SIM115
        self._descriptor = self._file.fileno()
        try:
            self._write(*with_room(schema.serialize()))
        except OSError:
            self.close()
            raise

    def append(self, batch: pa.RecordBatch | Message) -> None:
        """Write a batch. After an error, the file has the rows that it had before."""
        message = batch if isinstance(batch, Message) else Message.of(batch)
        if message.schema is not self._schema and message.schema != self._schema:
            self._write(*with_room(message.schema.serialize()))
        self._schema = message.schema
        self._write(message.buffer, message.body)
        self.rows += message.num_rows

    def _write(self, message: bytearray, body: int) -> None:
        """Write a message with its checksums, given the position of its body."""
        content, size, descriptor = memoryview(message), len(message), self._descriptor
        CHECKS.pack_into(message, body - CHECKS_BYTES, MAGIC, size - body, zlib.crc32(content[body:]))
        content[body - 4 : body] = zlib.crc32(content[: body - 4]).to_bytes(4, "little")
        try:
            written = os.write(descriptor, message)
            while written < size:
                written += os.write(descriptor, content[written:])
            if self._fsync:
                os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, self.size)
            raise
        self.size += size
        stat = os.fstat(descriptor)
        if stat.st_nlink == 0:
            raise FileNotFoundError(f"{self.path} was removed while it was being written")
        if stat.st_size != self.size:
            raise OSError(f"{self.path} was changed by another process while it was being written")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass
class JournalReader:
    """The content of a journal."""

    path: Path
    schema: pa.Schema | None = None  # the schema of the next batch; None if it cannot be read
    # Whether the last message is incomplete: it was being written, or the process ended while writing it.
    torn: bool = False
    problem: str | None = None  # a message about any other damage; None without damage
    rows: int = 0  # the number of rows read so far, including earlier readings
    end: int = 0  # the number of bytes up to the end of the last message that was read
    _source: pa.NativeFile | None = field(default=None, repr=False)

    @classmethod
    def of(cls, path: Path, *, exclusive: bool = False, after: JournalReader | None = None) -> JournalReader:
        """Open a journal.

        Args:
            exclusive: Whether no other process writes to it. It is then memory-mapped instead of read into memory.
            after: An earlier reading of the same file, which has only grown since. Only the new content is read.

        Raises:
            FileNotFoundError: The file does not exist, for example because its rows are in a Parquet file now.
        """
        reading = cls(path) if after is None or after.schema is None else replace(after, torn=False, problem=None)
        if not path.stat().st_size:
            reading.torn = True
            return reading
        if exclusive:
            reading._source = pa.memory_map(str(path))
        else:
            with open(path, "rb") as file:
                file.seek(reading.end)
                reading._source = pa.BufferReader(file.read())
        if reading.schema is None:
            start = reading._source.read(len(STREAM_MAGIC))
            if not STREAM_MAGIC.startswith(start):
                reading.problem = f"not an Arrow stream: the file is not read; {REMEDY}"
                return reading
            reading._source.seek(0)
            message = reading._next_message(reading._source)
            if message is not None:
                reading.schema, reading.end = pa.ipc.read_schema(message), reading._source.tell()
        return reading

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the batches up to the first unreadable one. The other attributes are final when the iteration ends."""
        for message in self._messages():
            batch = pa.ipc.read_record_batch(message, self.schema)
            self.rows += batch.num_rows
            yield batch

    def stacks(self) -> Iterator[tuple[pa.RecordBatch, int]]:
        """Yield the rows of `batches`, those of several batches together, and the number of rows of each of these batches."""
        bodies: list[pa.Buffer] = []
        kind: tuple[pa.Schema, bytes] | None = None
        first, size = pa.record_batch([]), 0
        for message in self._messages():
            metadata, body = message.metadata.to_pybytes()[:-CHECKS_BYTES], message.body
            if kind is None or size >= STACK_BYTES or kind[1] != metadata or kind[0] is not self.schema:
                if bodies:
                    yield stack(first, bodies), first.num_rows
                first, bodies, size = pa.ipc.read_record_batch(message, self.schema), [], 0
                kind = (self.schema, metadata) if all(map(_is_known, first.schema.types)) else None
            bodies.append(body)
            size += body.size
            self.rows += first.num_rows
        if bodies:
            yield stack(first, bodies), first.num_rows

    def _messages(self) -> Iterator[pa.ipc.Message]:
        while self.schema is not None and self._source is not None and self.problem is None:
            began = self._source.tell()
            message = self._next_message(self._source)
            if message is None:
                return
            self.end += self._source.tell() - began
            if message.type == "schema":
                self.schema = pa.ipc.read_schema(message)
            else:
                yield message

    def _next_message(self, source: pa.NativeFile) -> pa.ipc.Message | None:
        """Return the next message; None at the end of the file, or if the next message is incomplete or damaged."""
        began = source.tell()
        if began == source.size() or not self._is_correct(source):
            return None
        source.seek(began)
        return pa.ipc.read_message(source)

    def _is_correct(self, source: pa.NativeFile) -> bool:
        """Return whether the next message is complete and has the right checksums."""
        start = source.read(PREFIX_BYTES)
        size = size_of_metadata(start)
        metadata = source.read(size)
        checks = metadata[-CHECKS_BYTES:]
        # A complete message in which the size is damaged contains all of its checksums.
        has_checks = MAGIC in metadata[: len(metadata) + len(MAGIC) - CHECKS_BYTES]
        if len(start) < PREFIX_BYTES or (len(metadata) < size and not has_checks):
            self.torn = True
            return False
        is_intact = checks.startswith(MAGIC) and zlib.crc32(metadata[:-4], zlib.crc32(start)) == int.from_bytes(
            checks[-4:], "little"
        )
        if is_intact:
            _, size, checksum = CHECKS.unpack_from(checks)
            body = source.read_buffer(size)
            self.torn = len(body) < size
            is_intact = self.torn or zlib.crc32(body) == checksum
        if not is_intact:
            self.problem = f"the rows after row {self.rows:,} do not match their checksum: they are not read; {REMEDY}"
        return is_intact and not self.torn

    def without_content(self) -> JournalReader:
        """Return this reading without the content that was read, as the start of the next one."""
        return replace(self, _source=None)


def stack(first: pa.RecordBatch, bodies: Sequence[pa.Buffer]) -> pa.RecordBatch:
    """Return the rows of messages with the same metadata and schema. `first`: the rows of the first one, which refer to its body.

    Arrow takes a microsecond for each column of each message. The steps of a training write messages that differ in numbers and
    labels only, so each buffer has the same position in all of them.
    """
    if len(bodies) == 1:
        return first
    content = np.stack([np.frombuffer(body, np.uint8) for body in bodies])
    columns = [_stacked(column, content, bodies[0].address) for column in first.columns]
    return pa.RecordBatch.from_arrays(columns, schema=first.schema)


def _is_known(dtype: pa.DataType) -> bool:
    """Return whether `stack` supports a type."""
    if pa.types.is_map(dtype):
        return _is_known(dtype.key_type) and _is_known(dtype.item_type)
    if pa.types.is_list(dtype):
        return _is_known(dtype.value_type)
    return bool(pa.types.is_primitive(dtype) or pa.types.is_string(dtype))


def _stacked(first: pa.Array, bodies: _Bytes, address: int) -> pa.Array:
    count, rows, dtype = len(bodies), len(first), first.type
    if first.null_count == rows:
        return pa.nulls(count * rows, dtype)
    validity, memory, *chars = first.buffers()[:3]

    def part(buffer: pa.Buffer, size: int) -> _Bytes:
        start = buffer.address - address
        return np.ascontiguousarray(bodies[:, start : start + size])

    def bits(buffer: pa.Buffer) -> pa.Buffer:
        each = np.unpackbits(part(buffer, -(-rows // 8)), axis=1, count=rows, bitorder="little")
        return pa.py_buffer(np.packbits(each, bitorder="little"))

    valid = bits(validity) if first.null_count else None
    if pa.types.is_boolean(dtype):
        return pa.Array.from_buffers(dtype, count * rows, [valid, bits(memory)], first.null_count * count)
    if pa.types.is_primitive(dtype):
        values = pa.py_buffer(part(memory, rows * dtype.bit_width // 8))
        return pa.Array.from_buffers(dtype, count * rows, [valid, values], first.null_count * count)
    offsets = part(memory, 4 * (rows + 1)).view(np.int32)
    sizes = offsets[:, -1]
    ends = np.cumsum(sizes, dtype=np.int32)
    buffers = [valid, pa.py_buffer(np.append(offsets[:, :-1] + (ends - sizes)[:, None], ends[-1:]))]
    if pa.types.is_string(dtype):
        longest = int(sizes.max())
        text = part(chars[0], longest)[np.arange(longest) < sizes[:, None]] if longest else b""
        return pa.Array.from_buffers(dtype, count * rows, [*buffers, pa.py_buffer(text)], first.null_count * count)
    if pa.types.is_map(dtype):
        parts = [_stacked(each, bodies, address) for each in (first.keys, first.items)]
        child = pa.StructArray.from_arrays(parts, fields=[dtype.key_field, dtype.item_field])
    else:
        child = _stacked(first.values, bodies, address)
    return pa.Array.from_buffers(dtype, count * rows, buffers, first.null_count * count, children=[child])
