"""Files behind an address, as Arrow reads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from pyarrow import PythonFile
from pyarrow.fs import FileSystem, FSSpecHandler, PyFileSystem

from ..sinks.remote import is_address


def arrow_files(folder: Path) -> FileSystem | None:
    """What Arrow reads a folder's files with; None for those of this machine."""
    if not is_address(folder):
        return None
    return PyFileSystem(_Handler(cast(Any, folder).fs))


class _Handler(FSSpecHandler):  # type: ignore[misc]
    """Reads what Arrow asks for and nothing ahead: Arrow knows which columns it needs, and asks for what lies together at once."""

    def open_input_file(self, path: str) -> PythonFile:
        """Open a file to read from any place in it."""
        return PythonFile(self.fs.open(path, mode="rb", cache_type="none"), mode="r")
