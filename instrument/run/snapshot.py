"""What a folder holds before a run is begun in it, so that a run that is refused leaves it as it was."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ..sinks.lock import is_locked
from ..sinks.remote import SWEEP_RECORD

RECORDS = ("run.json", "instrument.log", ".hydra/config.yaml", ".hydra/hydra.yaml", ".hydra/overrides.yaml")


@dataclass(frozen=True)
class Snapshot:
    """The names in a folder, and the records that a run writes over or appends to.

    Attributes:
        folder: The folder, which need not exist.
        missing: The folder and those above it that do not exist, the innermost first.
        names: What is in it.
        records: The contents of the records in it, by their paths.
    """

    folder: Path
    missing: tuple[Path, ...]
    names: frozenset[str]
    records: dict[str, bytes]

    @classmethod
    def take(cls, folder: Path) -> Snapshot:
        """The state of a folder now."""
        folder = folder.absolute()  # a job may change the working directory
        if not folder.is_dir():
            return cls(folder, tuple(path for path in (folder, *folder.parents) if not path.exists()), frozenset(), {})
        records = {name: (folder / name).read_bytes() for name in RECORDS if (folder / name).is_file()}
        return cls(folder, (), frozenset(path.name for path in folder.iterdir()), records)

    def has_new_run(self) -> bool:
        """Whether a run was begun in the folder, or below it, since."""
        new = (path for path in self.folder.glob("*") if path.name not in self.names)
        return any(path.name == "run.json" or _has(path, "run.json") for path in new)

    def restore(self) -> None:
        """Remove what a run has left in the folder, and put its records back.

        Other new files stay where they are: a loop of the user's may have written them. A folder in which another process
        runs is left alone.
        """
        if is_locked(self.folder):
            return
        for path in self.folder.glob("*"):
            if path.name not in self.names:
                _remove_what_is_of_a_run(path)
        for name in RECORDS:
            if name not in self.records and (self.folder / name).is_file():
                (self.folder / name).unlink()
        for name, content in self.records.items():
            (self.folder / name).write_bytes(content)
        for path in self.missing:
            with suppress(OSError):  # it is not empty
                path.rmdir()


def _remove_what_is_of_a_run(path: Path) -> None:
    """Remove a file or folder that a run or a sweep makes: of a table's folder its parts, and the folder if it is then empty."""
    from ..capture.tables import TABLES  # they import pyarrow, which most refusals do without
    from ..sinks.parts import JOURNALS
    from ..sinks.tracking import PLACES
    from .sweep.jobs import REFUSED
    from .sweep.told import SUBMITTED

    if path.is_symlink():  # no run makes one
        return
    if path.is_file():
        if path.name in {*RECORDS, SWEEP_RECORD}:
            path.unlink()
    elif path.name in TABLES:
        for part in path.glob("part-*.parquet"):
            part.unlink()
        with suppress(OSError):  # it is not empty
            path.rmdir()
    elif path.name in {".hydra", *PLACES.values(), JOURNALS, SUBMITTED} or (
        _has(path, ".hydra", REFUSED) and not _has(path, "run.json")  # a sweep's job that was not begun
    ):
        shutil.rmtree(path, ignore_errors=True)


def _has(folder: Path, *names: str) -> bool:
    """Whether a file or folder of one of these names is in a folder, or below it."""
    return any(next(folder.rglob(name), None) is not None for name in names)
