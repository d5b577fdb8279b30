"""Checksums of Parquet files, so that damage on disk is an error instead of other values, and file systems that verify them.

Each page has the CRC-32 of the Parquet format, which other readers can verify. It covers neither the headers of pages nor
the footer. This package therefore adds a block in front of the footer, which Parquet readers skip:

    row groups | position, size and CRC-32 of each column of each row group | number of columns, CRC-32, MAGIC | footer

The second CRC-32 covers the block and the footer. A `CheckedFile` verifies the footer when it is opened, and each column
when it is read. Files without a block, of earlier versions, are read unverified.
"""

from __future__ import annotations

import atexit
import io
import os
import struct
import threading
import time
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast
from weakref import WeakSet

import pyarrow.parquet as pq
from pyarrow import PythonFile
from pyarrow.fs import FileInfo, FileSystem, FSSpecHandler, LocalFileSystem, PyFileSystem

from ..errors import InstrumentError
from .remote_folder import is_address, safe_message

REMEDY = "restore the file from a copy, or repeat the run"
"""What to do about a damaged file, for messages."""
MAGIC = b"INSTRCRC"
CHUNK_BYTES = 2**20  # The bytes that are read at once to compute a checksum.
TAIL_BYTES = 2**16  # The bytes at the end that are read first. Parquet readers request the same number.
_COLUMN = struct.Struct("<QQI")  # position, size, CRC-32
_END = struct.Struct("<II8s")  # number of columns, CRC-32 of the block and the footer, MAGIC
_FOOTER_END = struct.Struct("<I4s")  # size of the footer, "PAR1"


class DamagedFileError(OSError):
    """The content of a file does not match its checksums."""


def add_checksums(path: Path) -> None:
    """Insert the block of checksums into a complete Parquet file."""
    columns = column_ranges(pq.read_metadata(path))
    with open(path, "r+b") as file:
        block = b"".join(_COLUMN.pack(start, size, _checksum_of(file, start, size)) for start, size in columns)
        file.seek(-_FOOTER_END.size, os.SEEK_END)
        footer_size, _ = _FOOTER_END.unpack(file.read())
        start = file.seek(-_FOOTER_END.size - footer_size, os.SEEK_END)
        footer = file.read()
        file.seek(start)
        file.write(block + _END.pack(len(columns), zlib.crc32(footer, zlib.crc32(block)), MAGIC) + footer)


def _checksum_of(file: BinaryIO, start: int, size: int) -> int:
    file.seek(start)
    checksum = 0
    for at in range(0, size, CHUNK_BYTES):
        checksum = zlib.crc32(file.read(min(CHUNK_BYTES, size - at)), checksum)
    return checksum


def column_ranges(metadata: pq.FileMetaData) -> list[tuple[int, int]]:
    """Return the position and the size in bytes of each column of each row group."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    columns = (group.column(index) for group in groups for index in range(group.num_columns))
    return sorted(
        (each.dictionary_page_offset or each.data_page_offset, each.total_compressed_size) for each in columns
    )


class CheckedFile(io.RawIOBase):
    """A Parquet file that verifies what is read.

    Each thread has its own position, so that several threads can read.

    Raises:
        DamagedFileError: From the constructor and `read`: the content does not match its checksums.
    """

    def __init__(self, file: BinaryIO) -> None:
        _files.add(self)
        self._file = file
        self.size = file.seek(0, os.SEEK_END)
        self._lock = threading.Lock()
        self._position = threading.local()
        self._tail_start, self._tail = self.size, b""
        self._tail = self._bytes(max(0, self.size - TAIL_BYTES), self.size)
        self._tail_start = self.size - len(self._tail)
        self._end = self.size  # of the columns
        self._columns: list[tuple[int, int, int]] = []
        self._verified: set[int] = set()
        try:
            self._read_block()
        except BaseException:
            self.close()
            raise

    def _read_block(self) -> None:
        size = int.from_bytes(self._tail[-_FOOTER_END.size : -4], "little") + _FOOTER_END.size + _END.size
        end = self._bytes(self.size - size, self.size) if size <= self.size else b""
        if end[_END.size - len(MAGIC) : _END.size] != MAGIC:
            if MAGIC in self._tail:
                raise DamagedFileError("its last bytes are damaged")
            return
        count, checksum, _ = _END.unpack_from(end)
        start = self.size - size - count * _COLUMN.size
        block = self._bytes(start, self.size - size) if start >= 0 else b""
        if zlib.crc32(end[_END.size :], zlib.crc32(block)) != checksum:
            raise DamagedFileError("its footer does not match its checksum")
        self._end = start
        self._columns = list(_COLUMN.iter_unpack(block))

    def _bytes(self, start: int, end: int) -> bytes:
        if start >= self._tail_start:
            return self._tail[start - self._tail_start : end - self._tail_start]
        with self._lock:
            self._file.seek(start)
            return self._file.read(end - start)

    def read(self, size: int = -1) -> bytes:
        """Read the next bytes, and verify the columns that they belong to."""
        start = self.tell()
        end = self.size if size < 0 else min(start + size, self.size)
        content = self._bytes(start, end)
        self._position.value = start + len(content)
        self.verify(start, end, content)
        return content

    def verify(self, start: int, end: int, content: bytes = b"") -> None:
        """Verify the columns that overlap a range of bytes, of which `content` is known. Raise a DamagedFileError for damaged ones."""
        index = max(0, bisect_right(self._columns, (start,)) - 1)
        for position, size, checksum in self._columns[index:]:
            if position >= end:
                break
            if position + size <= start or position in self._verified:
                continue
            if start <= position and position + size <= start + len(content):
                column = memoryview(content)[position - start : position - start + size]
            elif end > self._end:  # to read the footer, readers request more bytes than it has
                continue
            else:
                column = memoryview(self._bytes(position, position + size))
            if zlib.crc32(column) != checksum:
                raise DamagedFileError(f"bytes {position:,} to {position + size:,} do not match their checksum")
            self._verified.add(position)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self.size}[whence]
        self._position.value = base + offset
        return base + offset

    def tell(self) -> int:
        return getattr(self._position, "value", 0)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def close(self) -> None:
        self._file.close()
        super().close()


_files: WeakSet[CheckedFile] = WeakSet()
_WAIT_SECONDS = 0.5  # for files that other code still refers to


@atexit.register
def _wait_for_arrow() -> None:
    """Wait until Arrow's threads have released the files that they have read.

    A thread that releases an object of Python while the interpreter ends aborts the process.
    """
    end = time.monotonic() + _WAIT_SECONDS
    while _files and time.monotonic() < end:
        time.sleep(0.001)


def open_checked(path: str) -> CheckedFile:
    """Open a local file. Raise a DamagedFileError if its footer does not match its checksum."""
    return CheckedFile(open(path, "rb"))


class _LocalHandler(FSSpecHandler):  # type: ignore[misc]
    """Opens local files as checked files; its other methods are those of Arrow's local file system."""

    def get_type_name(self) -> str:
        return "checked"

    def get_file_info(self, paths: list[str]) -> list[FileInfo]:
        infos: list[FileInfo] = self.fs.get_file_info(paths)
        return infos

    def open_input_file(self, path: str) -> PythonFile:
        return PythonFile(open_checked(path), mode="r")


LOCAL_FILES = PyFileSystem(_LocalHandler(LocalFileSystem()))
"""The local file system, with files that verify what is read."""


def arrow_files(folder: Path) -> FileSystem:
    """Return the Arrow file system of a folder."""
    return PyFileSystem(_RemoteHandler(cast(Any, folder).fs)) if is_address(folder) else LOCAL_FILES


@contextmanager
def remote_errors(location: object) -> Iterator[None]:
    """Convert errors of a remote request to an InstrumentError, so that no connection problem is mistaken for a damaged file."""
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:  # storage clients raise many types of errors
        raise InstrumentError(f"{location} cannot be reached: {safe_message(error)}") from None


def open_remote(files: Any, path: str) -> CheckedFile:
    """Open a file of an fsspec file system. Raise an InstrumentError if it cannot be reached; otherwise as `open_checked`."""
    with remote_errors(path):  # without read-ahead: readers request the needed columns in large ranges
        file = files.open(path, mode="rb", cache_type="none")
    return _RemoteFile(file, path)


class _RemoteHandler(FSSpecHandler):  # type: ignore[misc]
    """Opens remote files as checked files."""

    def open_input_file(self, path: str) -> PythonFile:
        return PythonFile(open_remote(self.fs, path), mode="r")


class _RemoteFile(CheckedFile):
    """A remote file whose reads raise `InstrumentError` if the connection fails."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._path = path
        super().__init__(file)

    def _bytes(self, start: int, end: int) -> bytes:
        with remote_errors(self._path):
            return super()._bytes(start, end)
