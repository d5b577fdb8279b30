"""The journal: an Arrow stream file of rows that are not in a Parquet file yet.

When `append` returns, the operating system has the data, which survives the end of the process. The rows of one step
and table are one message of the stream, written in one call. A reader sees complete messages and possibly an incomplete
last one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pyarrow as pa

from ..capture.message_template import Message

SUFFIX = ".arrows"
STREAM_MAGIC = b"\xff\xff\xff\xff"  # The first bytes of every message of an Arrow stream.
# Parts of Arrow's error messages for a stream that ends within a message.
TRUNCATION_MESSAGES = ("Expected to", " bytes available")
UNREADABLE = (pa.ArrowException, OSError, EOFError, MemoryError)


class Journal:
    """A growing file of record batches.

    Args:
        path: The file. It must not exist.
        schema: The schema of the batches.
        fsync: Whether rows survive a power failure, in addition to the end of the process.

    Raises:
        OSError: From the constructor and `append`: the file cannot be written, or it was removed.
    """

    def __init__(self, path: Path, schema: pa.Schema, *, fsync: bool = False) -> None:
        self.path = path
        self.rows = 0
        self.size = 0
        self._fsync = fsync
        # In append mode: the position is always the end of the file, so that truncation by another process shows in its
        # size.
        self._file = open(path, "xb", buffering=0, opener=_appending)  # noqa: SIM115
        try:
            self._write(schema.serialize())
        except OSError:
            self.close()
            raise

    def append(self, batch: pa.RecordBatch | Message) -> None:
        """Write a batch. After an error, the file is as it was before."""
        self._write(batch.serialize())
        self.rows += batch.num_rows

    def _write(self, message: pa.Buffer | bytearray) -> None:
        rest = memoryview(message)
        size = len(rest)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            if self._fsync:
                os.fsync(self._file.fileno())
        except OSError:
            os.ftruncate(self._file.fileno(), self.size)
            raise
        self.size += size
        stat = os.fstat(self._file.fileno())
        if stat.st_nlink == 0:
            raise FileNotFoundError(f"{self.path} was removed while it was being written")
        if stat.st_size != self.size:
            raise OSError(f"{self.path} was changed by another process while it was being written")

    def is_intact(self) -> bool:
        """Return whether the file exists with all the data that was written.

        Raises:
            OSError: The folder cannot be read.
        """
        try:
            found = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(found, os.fstat(self._file.fileno())) and found.st_size >= self.size

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _appending(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_APPEND, 0o666)


@dataclass
class JournalReader:
    """The content of a journal.

    Attributes:
        path: The file.
        schema: The schema of the batches; None if it cannot be read.
        torn: Whether the last message is incomplete: it was being written, or the process ended while writing it.
        problem: A message about any other damage; None if there is none.
        rows: The number of rows read so far, including earlier readings.
        end: The number of bytes up to the end of the last message that was read.
    """

    path: Path
    schema: pa.Schema | None = None
    torn: bool = False
    problem: str | None = None
    rows: int = 0
    end: int = 0
    _head: bytes = field(default=b"", repr=False)  # the message with the schema
    _source: pa.NativeFile | None = field(default=None, repr=False)
    _stream: pa.ipc.RecordBatchStreamReader | None = field(default=None, repr=False)

    @classmethod
    def of(cls, path: Path, *, exclusive: bool = False, after: JournalReader | None = None) -> JournalReader:
        """Open a journal.

        Args:
            path: The file.
            exclusive: Whether no other process writes to it. It is then memory-mapped instead of read into memory.
            after: An earlier reading of the same file, which has only grown since. Only the new content is read.

        Raises:
            FileNotFoundError: The file does not exist, for example because its rows are in a Parquet file now.
        """
        if after is not None and after.schema is not None:
            reading = cls(path, rows=after.rows, end=after.end, _head=after._head)
        else:
            reading = cls(path)
        if not path.stat().st_size:
            reading.torn = True
            return reading
        # Not opened as a stream: Arrow then checks a damaged length against the size of the content.
        content = (
            pa.memory_map(str(path)) if exclusive else pa.BufferReader(reading._head + _content_from(path, reading.end))
        )
        beginning = content.read(len(STREAM_MAGIC))
        if beginning != STREAM_MAGIC[: len(beginning)]:
            reading.problem = "not an Arrow stream: the file is not read"
            return reading
        content.seek(0)
        try:
            reading._source = content
            reading._stream = pa.ipc.open_stream(reading._source)
            reading.schema = reading._stream.schema
        except UNREADABLE as error:
            reading._set_problem(error)
            return reading
        if not reading._head:
            reading.end = content.tell()
            content.seek(0)
            reading._head = content.read(reading.end)
        return reading

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the batches up to the first unreadable one. The other attributes are final when the iteration ends."""
        while self._stream is not None and self._source is not None:
            began = self._source.tell()
            try:
                batch = self._stream.read_next_batch()
                batch.validate(full=True)
            except StopIteration:
                if self._source.tell() < self._source.size():
                    self.problem = "the stream ends before the file does; the rest is not read"
                return
            except UNREADABLE as error:
                self._set_problem(error)
                return
            self.end += self._source.tell() - began
            self.rows += batch.num_rows
            yield batch

    def without_content(self) -> JournalReader:
        """Return this reading without the content that was read, as the start of the next one."""
        return replace(self, _source=None, _stream=None)

    def _set_problem(self, error: Exception) -> None:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if any(words in text for words in TRUNCATION_MESSAGES):
            self.torn = True
        else:
            self.problem = f"{text}; the rest is not read"


def _content_from(path: Path, start: int) -> bytes:
    """Return the content of a file from a position on."""
    with open(path, "rb") as file:
        file.seek(start)
        return file.read()
