"""The files of runs for DuckDB, as a file system that verifies what is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from ..storage.checksums import CheckedFile, open_checked, open_remote
from ..storage.remote_folder import is_address


class DuckDBFiles(AbstractFileSystem):  # type: ignore[misc]
    """A file system for DuckDB: that of the folder of a run."""

    cachable = False

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.error: Exception | None = None  # why the last file could not be opened; DuckDB reports only a traceback
        self._names: set[str] = set()
        self._files = cast(Any, folder).fs if is_address(folder) else LocalFileSystem()
        self._is_remote = is_address(folder)
        self.protocol = self._files.protocol

    def name(self, file: Path) -> str:
        """Return the name of a file in a query. It is not a pattern, whatever characters it contains."""
        name = str(file) if self._is_remote else f"file://{file}"  # DuckDB would read a local path without these files
        self._names.add(name)
        return name

    def open(self, path: str, mode: str = "rb", **options: Any) -> CheckedFile:
        if mode != "rb":
            return cast(CheckedFile, self._files.open(path, mode, **options))
        name = self._files._strip_protocol(path)
        try:
            return open_remote(self._files, name) if self._is_remote else open_checked(name)
        except Exception as error:
            self.error = error
            raise

    def glob(self, path: str, **options: Any) -> list[str]:
        return [path] if path in self._names else cast(list[str], self._files.glob(path, **options))

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        return cast(dict[str, Any], self._files.info(path, **options))

    def modified(self, path: str) -> Any:
        return self._files.modified(path)
