"""Arrow file systems for remote folders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from pyarrow import PythonFile
from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem

from ..errors import InstrumentError
from ..sinks.remote_errors import safe_message
from ..sinks.remote_folder import is_address


def arrow_files(folder: Path) -> FileSystem | None:
    """Return the Arrow file system of a remote folder; None for a local folder."""
    if not is_address(folder):
        return None
    return PyFileSystem(_Handler(cast(Any, folder).fs))


@contextmanager
def remote_errors(location: object) -> Iterator[None]:
    """Convert errors of a remote request, so that a connection problem is not mistaken for a damaged file.

    Raises:
        FileNotFoundError: The file does not exist.
        InstrumentError: The remote folder cannot be reached.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:  # storage clients raise many types of errors
        raise InstrumentError(f"{location} cannot be reached: {safe_message(error)}") from None


class _Handler(FSSpecHandler):  # type: ignore[misc]
    """Reads exactly the requested bytes, without read-ahead: Arrow requests the needed columns in large ranges."""

    def open_input_file(self, path: str) -> PythonFile:
        """Open a file for random access."""
        with remote_errors(path):
            return PythonFile(_File(self.fs.open(path, mode="rb", cache_type="none"), path), mode="r")


class _File:
    """A remote file whose reads raise `InstrumentError` if the connection fails."""

    def __init__(self, file: Any, path: str) -> None:
        self._file = file
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int = -1) -> bytes:
        """Read the next bytes."""
        with remote_errors(self._path):
            return cast(bytes, self._file.read(size))
