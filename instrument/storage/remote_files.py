"""File systems with the files of runs, local or remote. Their files verify what is read."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from pyarrow import PythonFile
from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem

from ..errors import InstrumentError
from .checksums import LOCAL_FILES, CheckedFile
from .remote_errors import safe_message
from .remote_folder import is_address


def arrow_files(folder: Path) -> FileSystem:
    """Return the Arrow file system of a folder."""
    return PyFileSystem(_Handler(cast(Any, folder).fs)) if is_address(folder) else LOCAL_FILES


@contextmanager
def remote_errors(location: object) -> Iterator[None]:
    """Convert errors of a remote request, so that a connection problem is not mistaken for a damaged file.

    Raises:
        InstrumentError: The remote folder cannot be reached.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:  # storage clients raise many types of errors
        raise InstrumentError(f"{location} cannot be reached: {safe_message(error)}") from None


def open_remote(files: Any, path: str) -> CheckedFile:
    """Open a file of an fsspec file system.

    Exactly the requested bytes are read, without read-ahead: readers request the needed columns in large ranges.

    Raises:
        DamagedFileError: The footer of the file does not match its checksum.
        InstrumentError: The remote folder cannot be reached.
    """
    with remote_errors(path):
        file = files.open(path, mode="rb", cache_type="none")
    return _File(file, path)


class _Handler(FSSpecHandler):  # type: ignore[misc]
    """Opens remote files as checked files."""

    def open_input_file(self, path: str) -> PythonFile:
        """Open a file for random access."""
        return PythonFile(open_remote(self.fs, path), mode="r")


class _File(CheckedFile):
    """A remote file whose reads raise `InstrumentError` if the connection fails."""

    def __init__(self, file: BinaryIO, path: str) -> None:
        self._path = path
        super().__init__(file)

    def _bytes(self, start: int, end: int) -> bytes:
        with remote_errors(self._path):
            return super()._bytes(start, end)
