"""Who writes to a run's folder: one process, as long as it lives."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

LOCK = ".lock"
PATIENCE = 1.0  # seconds; a reader that looks whether a run still runs has the lock for an instant


class FolderLock:
    """A lock on a run's folder; the operating system lets go of it when the process ends, however it ends."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LOCK
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


def is_locked(folder: Path) -> bool:
    """Whether a process writes to a run's folder at this moment."""
    path = folder / LOCK
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
