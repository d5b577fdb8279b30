"""The journal: an Arrow stream of rows that are in no Parquet file yet.

What `append` has returned from is in the hands of the operating system, and stays there whatever becomes of the process.
A step's rows of one table are one message of the stream, written at once; whoever reads meets whole messages, and at the
end perhaps the beginning of one that was being written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

SUFFIX = ".arrows"
BEGINNING = b"\xff\xff\xff\xff"  # of every message of an Arrow stream
TORN = ("Expected to", " bytes available")  # what Arrow says where a stream ends in the middle of something
UNREADABLE = (pa.ArrowException, OSError, EOFError, MemoryError)


class Journal:
    """A growing file of record batches.

    Args:
        path: The file; there is none yet.
        schema: Of the batches.
        fsync: Whether rows are to outlive a power failure too, and not only the process.

    Raises:
        OSError: Here, and when rows are appended: the file cannot be written, or somebody removed it.
    """

    def __init__(self, path: Path, schema: pa.Schema, *, fsync: bool = False) -> None:
        self.path = path
        self.rows = 0
        self.size = 0
        self._fsync = fsync
        # At the end of the file, wherever that is: that another process has cut it is to show in its size.
        self._file = open(path, "xb", buffering=0, opener=_appending)  # noqa: SIM115
        try:
            self._write(schema.serialize())
        except OSError:
            self.close()
            raise

    def append(self, batch: pa.RecordBatch) -> None:
        """Write a batch; on an error the file is as it was before."""
        self._write(batch.serialize())
        self.rows += batch.num_rows

    def _write(self, message: pa.Buffer) -> None:
        rest = memoryview(message)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            if self._fsync:
                os.fsync(self._file.fileno())
        except OSError:
            os.ftruncate(self._file.fileno(), self.size)
            raise
        self.size += message.size
        there = os.fstat(self._file.fileno())
        if there.st_nlink == 0:
            raise FileNotFoundError(f"{self.path} was removed while it was written")
        if there.st_size != self.size:
            raise OSError(f"{self.path} was changed by another process while it was written")

    def is_there(self) -> bool:
        """Whether the file is where it was begun, with all that was written to it.

        Raises:
            OSError: Its folder cannot be looked into.
        """
        try:
            found = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            return False
        return os.path.samestat(found, os.fstat(self._file.fileno())) and found.st_size >= self.size

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()


def _appending(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_APPEND, 0o666)


@dataclass
class Reading:
    """What a journal holds.

    Attributes:
        path: The file.
        schema: Of its batches; None where there is none to be read.
        torn: Whether the last message is not whole: it was being written when this was read, or the process ended.
        problem: What else is wrong with the file, in words; None where nothing is.
        rows: How many were read, by this and by what was read before.
        end: Bytes up to the end of the last message that was read.
    """

    path: Path
    schema: pa.Schema | None = None
    torn: bool = False
    problem: str | None = None
    rows: int = 0
    end: int = 0
    _head: bytes = field(default=b"", repr=False)  # the message that holds the schema
    _source: pa.NativeFile | None = field(default=None, repr=False)
    _stream: pa.ipc.RecordBatchStreamReader | None = field(default=None, repr=False)

    @classmethod
    def of(cls, path: Path, *, ours: bool = False, after: Reading | None = None) -> Reading:
        """Open a journal.

        Args:
            path: The file.
            ours: Whether nobody else writes to it, so that it need not be held in memory as a whole.
            after: What was read of the same file before, which has only been added to since; only what was added is read.

        Raises:
            FileNotFoundError: It is not there (any more: its rows are in a Parquet file now).
        """
        if after is not None and after.schema is not None:
            reading = cls(path, rows=after.rows, end=after.end, _head=after._head)
        else:
            reading = cls(path)
        if not path.stat().st_size:
            reading.torn = True
            return reading
        # Not as a stream: a length that is damaged is to be held against what there is.
        content = pa.memory_map(str(path)) if ours else pa.BufferReader(reading._head + _behind(path, reading.end))
        beginning = content.read(len(BEGINNING))
        if beginning != BEGINNING[: len(beginning)]:
            reading.problem = "no Arrow stream: it is not read"
            return reading
        content.seek(0)
        try:
            reading._source = content
            reading._stream = pa.ipc.open_stream(reading._source)
            reading.schema = reading._stream.schema
        except UNREADABLE as error:
            reading._stopped_by(error)
            return reading
        if not reading._head:
            reading.end = content.tell()
            content.seek(0)
            reading._head = content.read(reading.end)
        return reading

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The batches, up to the first that cannot be read; all else is known when the last was given."""
        while self._stream is not None and self._source is not None:
            began = self._source.tell()
            try:
                batch = self._stream.read_next_batch()
                batch.validate(full=True)
            except StopIteration:
                if self._source.tell() < self._source.size():
                    self.problem = "it says that it ends before it does; what comes behind is not read"
                return
            except UNREADABLE as error:
                self._stopped_by(error)
                return
            self.end += self._source.tell() - began
            self.rows += batch.num_rows
            yield batch

    def _stopped_by(self, error: Exception) -> None:
        told = str(error).splitlines()[0] if str(error) else type(error).__name__
        if any(words in told for words in TORN):
            self.torn = True
        else:
            self.problem = f"{told}; what comes behind is not read"


def _behind(path: Path, start: int) -> bytes:
    """What a file holds from a byte on."""
    with open(path, "rb") as file:
        file.seek(start)
        return file.read()
