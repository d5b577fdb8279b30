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
        return any(path.name == "run.json" or next(path.rglob("run.json"), None) is not None for path in new)

    def restore(self) -> None:
        """Remove what a run has left in the folder, and put its records back. A folder in which another process runs is left
        alone."""
        if is_locked(self.folder):
            return
        new = [path for path in self.folder.glob("*") if path.name not in self.names]
        if self.folder not in self.missing:  # other files may have come to be there
            new = [path for path in new if _is_of_a_run(path)]
            new += [self.folder / name for name in RECORDS if name not in self.records]
        for path in new:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            elif path.is_file():
                path.unlink()
        for name, content in self.records.items():
            (self.folder / name).write_bytes(content)
        for path in self.missing:
            with suppress(OSError):  # another run has come to be there
                path.rmdir()


def _is_of_a_run(path: Path) -> bool:
    """Whether a run or a sweep makes files or folders of this name, or the folder is a sweep's job."""
    from ..capture.tables import TABLES  # they import pyarrow, which most refusals do without
    from ..sinks.parts import JOURNALS
    from ..sinks.tracking import PLACES
    from .sweep.jobs import REFUSED
    from .sweep.told import SUBMITTED

    records = {name.partition("/")[0] for name in RECORDS}
    if path.name in {*records, *TABLES, *PLACES.values(), JOURNALS, SWEEP_RECORD, SUBMITTED}:
        return True
    return path.is_dir() and any(next(path.rglob(name), None) is not None for name in (".hydra", REFUSED))
