"""Files behind an address, as Arrow reads them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from pyarrow import PythonFile
from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem

from ..errors import InstrumentError
from ..sinks.client_errors import told
from ..sinks.remote import is_address


def arrow_files(folder: Path) -> FileSystem | None:
    """What Arrow reads a folder's files with; None for those of this machine."""
    if not is_address(folder):
        return None
    return PyFileSystem(_Handler(cast(Any, folder).fs))


@contextmanager
def reached(place: object) -> Iterator[None]:
    """Asks of a file behind an address; where nobody answers, or not any more, the file is not taken for a damaged one.

    Raises:
        FileNotFoundError: It is not there.
        InstrumentError: It cannot be reached.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except Exception as error:  # of many kinds: whatever a client raises
        raise InstrumentError(f"{place} cannot be reached: {told(error)}") from None


class _Handler(FSSpecHandler):  # type: ignore[misc]
    """Reads what Arrow asks for and nothing ahead: Arrow knows which columns it needs, and asks for what lies together at once."""

    def open_input_file(self, path: str) -> PythonFile:
        """Open a file to read from any place in it."""
        with reached(path):
            return PythonFile(_File(self.fs.open(path, mode="rb", cache_type="none"), path), mode="r")


class _File:
    """A file that says so where it cannot be reached any more."""

    def __init__(self, file: Any, path: str) -> None:
        self._file = file
        self._path = path

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def read(self, size: int = -1) -> bytes:
        """The bytes that come next."""
        with reached(self._path):
            return cast(bytes, self._file.read(size))
