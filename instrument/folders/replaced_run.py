"""The run in a folder that a new run replaces: its files are set aside, and removed when the new run ends."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from ..capture.deferred_interrupts import uninterrupted
from ..errors import ConfigError, Problem
from ..sinks.lock import FolderLock, is_written
from ..sinks.remote_folder import check_is_local
from .control_folder import CONTROL
from .folder_snapshot import RECORDS
from .run_record import CHECKPOINTS, read_record

ASIDE = ".replaced"  # subfolder in which the files wait; it is hidden, so it is not read as a run
REPORT = "report.html"


class ReplacedRun:
    """The run that a new run replaces. Files that no run writes stay in the folder.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder.absolute()  # The working directory may change.
        self._aside = self.folder / ASIDE
        self._is_set_aside = False

    def set_aside(self, where: str) -> None:
        """Move the files of the run to a hidden subfolder.

        Args:
            where: The configuration key of the folder, for error messages.

        Raises:
            ConfigError: The folder contains no run of this package, a process writes to it, or it cannot be written.
        """
        check_is_local(self.folder, where)
        if not (self.folder / "run.json").exists():
            _move(self._aside, self.folder)  # the files of a run, if a process was killed between both runs
        if not (self.folder / "run.json").exists():
            return
        read_record(self.folder, where)
        message = "the run in this folder is in progress, so it cannot be replaced"
        fix = "end that run first, or choose another folder"
        with FolderLock(self.folder).held(ConfigError(Problem(where, message, given=str(self.folder), fix=fix))):
            shutil.rmtree(self._aside, ignore_errors=True)  # left if a process was killed after it replaced a run
            with uninterrupted():
                self._move_aside(where)
                self._is_set_aside = True

    def restore(self) -> None:
        """Remove the files of the new run and move the others back, if the run was set aside and the new run has ended."""
        if self._is_set_aside and not is_written(self.folder):
            with uninterrupted():
                for path in _run_files(self.folder):
                    path.unlink()
                _move(self._aside, self.folder)
                self._is_set_aside = False

    def remove(self) -> None:
        """Remove the files that were set aside."""
        if self._is_set_aside:
            shutil.rmtree(self._aside, ignore_errors=True)

    def _move_aside(self, where: str) -> None:
        try:
            _move(self.folder, self._aside)
        except OSError as error:
            _move(self._aside, self.folder)
            message = f"the run in this folder cannot be replaced: {error.strerror}"
            raise ConfigError(Problem(where, message, given=str(self.folder))) from None


def _move(source: Path, target: Path) -> None:
    """Move the files of a run, then remove the folders that are empty."""
    files = _run_files(source)
    for path in files if target.name == ASIDE else reversed(files):
        new = target / path.relative_to(source)
        new.parent.mkdir(parents=True, exist_ok=True)
        path.rename(new)
    folders = {path.parent for path in files} - {source}
    for folder in [*folders, *([source] if source.name == ASIDE else [])]:
        with suppress(OSError):  # It is not empty, or does not exist.
            folder.rmdir()


def _run_files(folder: Path) -> list[Path]:
    """Return the files that a run writes. Runs create no symbolic links."""
    paths = (path for pattern in _patterns() for path in folder.glob(pattern))
    return [path for path in paths if path.is_file() and not path.is_symlink()]


def _patterns() -> list[str]:
    """Return the patterns of the files of a run, with run.json first: without it, the rest is not read as a run."""
    from ..sinks.parts import JOURNALS
    from ..sinks.tracking import TRACKER_FOLDERS
    from ..spec.tables import TABLES  # Imported late: they import pyarrow, which most errors do not need.

    return [
        *RECORDS,
        REPORT,
        *(f"{table}/part-*.parquet" for table in TABLES),
        f"{JOURNALS}/*",
        f"{CONTROL}/*",
        f"{CHECKPOINTS}/step-*",
        *(f"{folder}/events.out.tfevents.*" for folder in TRACKER_FOLDERS.values()),
    ]
