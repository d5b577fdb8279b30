"""The content of a folder before a run, used to restore the folder if the run is rejected."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..sinks.lock import is_locked
from ..sinks.remote_folder import SWEEP_RECORD

REFUSED = "refused.txt"  # in the folder of a job: the error that prevented its start
SUBMITTED = ".submitit"  # folder in which submitit stores the output of the jobs of a sweep
RECORDS = ("run.json", "instrument.log", ".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml")


@dataclass(frozen=True)
class Snapshot:
    """The names of the files in a folder, and the content of the files that a run overwrites or appends to.

    Attributes:
        folder: The folder. It need not exist.
        missing: The folder and its parents that do not exist, the innermost first.
        names: The names in the folder.
        records: The content of its record files, by relative path.
    """

    folder: Path
    missing: tuple[Path, ...]
    names: frozenset[str]
    records: dict[str, bytes]

    @classmethod
    def take(cls, folder: Path) -> Snapshot:
        """Return the present state of a folder."""
        folder = folder.absolute()  # A job may change the working directory.
        if not folder.is_dir():
            return cls(folder, tuple(path for path in (folder, *folder.parents) if not path.exists()), frozenset(), {})
        records = {name: (folder / name).read_bytes() for name in RECORDS if (folder / name).is_file()}
        return cls(folder, (), frozenset(path.name for path in folder.iterdir()), records)

    def has_new_run(self) -> bool:
        """Return whether a run was started in the folder, or in a subfolder, since the snapshot."""
        new = (path for path in self.folder.glob("*") if path.name not in self.names)
        return any(path.name == "run.json" or _has(path, "run.json") for path in new)

    def restore(self) -> None:
        """Remove the files of a run from the folder, and restore the record files.

        Other new files remain, because user code may have written them. Nothing is changed if another process
        runs in the folder.
        """
        if is_locked(self.folder):
            return
        for path in self.folder.glob("*"):
            if path.name not in self.names:
                _remove_run_files(path)
        for name in RECORDS:
            if name not in self.records and (self.folder / name).is_file():
                (self.folder / name).unlink()
        for name, content in self.records.items():
            (self.folder / name).write_bytes(content)
        for path in self.missing:
            with suppress(OSError):  # The folder is not empty.
                path.rmdir()


def _remove_run_files(path: Path) -> None:
    """Remove a file or folder that a run or a sweep creates.

    In the folder of a table, only the parts are removed, and then the folder if it is empty.
    """
    from ..sinks.parts import JOURNALS
    from ..sinks.tracking import TRACKER_FOLDERS
    from ..spec.tables import TABLES  # Imported late: it imports pyarrow, which is not needed for most errors.

    if path.is_symlink():  # Runs do not create symbolic links.
        return
    if path.is_file():
        if path.name in {*RECORDS, SWEEP_RECORD}:
            path.unlink()
    elif path.name in TABLES:
        for part in path.glob("part-*.parquet"):
            part.unlink()
        with suppress(OSError):  # The folder is not empty.
            path.rmdir()
    elif path.name in {".hydra", *TRACKER_FOLDERS.values(), JOURNALS, SUBMITTED} or (
        _has(path, ".hydra", REFUSED) and not _has(path, "run.json")  # A job of a sweep that did not start.
    ):
        shutil.rmtree(path, ignore_errors=True)


def _has(folder: Path, *names: str) -> bool:
    """Return whether a folder or its subfolders contain a file or folder with one of these names."""
    return any(next(folder.rglob(name), None) is not None for name in names)
