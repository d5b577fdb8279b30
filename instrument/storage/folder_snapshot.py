"""The content of a folder before a run: it is restored if the run is refused, also the run that the new one replaces."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from ..errors import ConfigError, Problem
from ..runtime.deferred_interrupts import uninterrupted
from .control_folder import CONTROL
from .lock import FolderLock, is_locked, is_written
from .remote_folder import SWEEP_RECORD, check_is_local
from .run_record import CHECKPOINTS, read_record

REFUSED = "refused.txt"  # in the folder of a job: the error that prevented its start
SUBMITTED = ".submitit"  # folder in which submitit stores the output of the jobs of a sweep
ASIDE = ".replaced"  # subfolder in which the files of a replaced run wait; it is hidden, so it is not read as a run
REPORT = "report.html"
RECORDS = ("run.json", "instrument.log", ".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml")


class Snapshot:
    """The names of the files in a folder, and the content of the files that a run overwrites or appends to.

    Args:
        replaces: The argument for error messages, if a new run replaces the one in the folder. The files of that run wait in a hidden
            subfolder; files that no run writes stay. Default: None, no run is replaced.

    Raises:
        ConfigError: The run to replace is in progress, or not a run of this package.
    """

    def __init__(self, folder: Path, *, replaces: str | None = None) -> None:
        self.folder = folder = folder.absolute()  # A job may change the working directory.
        self._aside, self.has_aside = folder / ASIDE, False  # whether a new run replaces one
        try:
            if replaces is not None:
                self._set_aside(replaces)
            # The folder and its parents that do not exist, the innermost first.
            self._missing = [path for path in (folder, *folder.parents) if not path.exists()]
            self._names = {path.name for path in folder.glob("*")}
            self._records = {name: (folder / name).read_bytes() for name in RECORDS if (folder / name).is_file()}
        except BaseException:  # also a signal
            self.restore_replaced()
            raise

    def has_new_run(self) -> bool:
        """Return whether a run was started in the folder, or in a subfolder, since the snapshot."""
        new = (path for path in self.folder.glob("*") if path.name not in self._names)
        return any(path.name == "run.json" or _has(path, "run.json") for path in new)

    def restore(self) -> None:
        """Remove the files of a run from the folder, restore the record files, and move the files of a replaced run back.

        Other new files remain, because user code may have written them. Nothing is changed if another process
        runs in the folder.
        """
        if is_locked(self.folder):
            return
        new = [path for path in self.folder.glob("*") if path.name not in self._names and not path.is_symlink()]
        for path in new:
            if path.name == SWEEP_RECORD:
                path.unlink()
            elif path.name == SUBMITTED or (_has(path, ".hydra", REFUSED) and not _has(path, "run.json")):
                shutil.rmtree(path, ignore_errors=True)  # a job of a sweep that did not start
        if new:
            _remove(self.folder, excluded=self._names)
        for name in RECORDS:
            if name not in self._records and (self.folder / name).is_file():
                (self.folder / name).unlink()
        for name, content in self._records.items():
            (self.folder / name).write_bytes(content)
        _remove_empty(self._missing)
        self.restore_replaced()

    def _set_aside(self, where: str) -> None:
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
                try:
                    _move(self.folder, self._aside)
                except OSError as error:
                    _move(self._aside, self.folder)
                    message = f"the run in this folder cannot be replaced: {error.strerror}"
                    raise ConfigError(Problem(where, message, given=str(self.folder))) from None
                self.has_aside = True

    def restore_replaced(self) -> None:
        """Remove the files of the new run, and move those of the replaced run back, unless a process writes to the folder."""
        if self.has_aside and not is_written(self.folder):
            with uninterrupted():
                _remove(self.folder)
                _move(self._aside, self.folder)
                self.has_aside = False

    def remove_replaced(self) -> None:
        """Remove the files of the replaced run."""
        if self.has_aside:
            shutil.rmtree(self._aside, ignore_errors=True)


def _has(folder: Path, *names: str) -> bool:
    return any(next(folder.rglob(name), None) is not None for name in names)


def _move(source: Path, target: Path) -> None:
    files = _run_files(source)
    for path in files if target.name == ASIDE else reversed(files):
        new = target / path.relative_to(source)
        new.parent.mkdir(parents=True, exist_ok=True)
        path.rename(new)
    _remove_empty({path.parent for path in files} - {source})
    _remove_empty([source] if source.name == ASIDE else [])


def _remove(folder: Path, excluded: Collection[str] = ()) -> None:
    files = [path for path in _run_files(folder) if path.relative_to(folder).parts[0] not in excluded]
    for path in files:
        path.unlink()
    _remove_empty({path.parent for path in files} - {folder})


def _remove_empty(folders: Iterable[Path]) -> None:
    for folder in folders:
        with suppress(OSError):  # It is not empty, or does not exist.
            folder.rmdir()


def _run_files(folder: Path) -> list[Path]:
    """Return the files that a run writes, run.json first: without it, the rest is not read as a run. None is a symbolic link."""
    from ..tables.schemas import TABLES  # Imported late: they import pyarrow, which most errors do not need.
    from ..trackers.tracking import TRACKER_FOLDERS
    from .parts import BLOCKS, JOURNALS

    patterns = [
        *RECORDS,
        REPORT,
        *(f"{table}/part-*.parquet" for table in TABLES),
        f"{BLOCKS}/block-*.raw",
        f"{JOURNALS}/*",
        f"{CONTROL}/*",
        f"{CHECKPOINTS}/step-*",
        *(f"{name}/events.out.tfevents.*" for name in TRACKER_FOLDERS.values()),
    ]
    paths = (path for pattern in patterns for path in folder.glob(pattern))
    return [path for path in paths if path.is_file() and not path.is_symlink()]
