"""Who writes to a run's folder: one process, or each of several that train together, as long as it lives."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"
PATIENCE = 1.0  # seconds; a reader that looks whether a run still runs has the lock for an instant


def lock_of(folder: Path, rank: int = 0) -> Path:
    """The file that a process of a run holds."""
    return folder / (f"{LOCK}-{rank:04d}" if rank else LOCK)


class FolderLock:
    """A lock on a run's folder; the operating system lets go of it when the process ends, however it ends."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.path = lock_of(folder, rank)
        self._lock = FileLock(self.path)

    def acquire(self) -> bool:
        """Whether the folder is ours now; False where another process, or another run of this one, writes to it."""
        try:
            self._lock.acquire(timeout=PATIENCE)
        except Timeout:
            return False
        return True

    def release(self) -> None:
        """The run is over."""
        with suppress(OSError):  # it may stay where it is: what counts is who holds it
            self.path.unlink()
        self._lock.release()


def is_locked(folder: Path, rank: int = 0) -> bool:
    """Whether a process writes to a run's folder at this moment: the first one, or the one of a rank."""
    path = lock_of(folder, rank)
    if not path.exists():
        return False
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except (
        Timeout,
        OSError,
    ):  # the latter where a folder cannot be written: then nothing is known, and nothing changed
        return True
    lock.release()
    return False


def is_written(folder: Path) -> bool:
    """Whether any of the processes of a run still writes to its folder."""
    ranks = (path.name.removeprefix(f"{LOCK}-") for path in folder.glob(f"{LOCK}-*"))
    return any(is_locked(folder, int(rank)) for rank in ["0", *ranks] if rank.isdigit())
