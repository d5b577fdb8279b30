"""Locks on the folder of a run. Each process of a run holds one while it lives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ..errors import InstrumentError
from ..runtime.deferred_interrupts import uninterrupted
from ..runtime.forks import OwnedByProcess

LOCK = ".lock"
LOCK_TIMEOUT = 1.0  # in seconds; a reader that checks whether a run is active holds the lock for an instant


def lock_of(folder: Path, rank: int = 0) -> Path:
    """Return the lock file of a process of a run."""
    return folder / (f"{LOCK}-{rank:04d}" if rank else LOCK)


class FolderLock(OwnedByProcess):
    """A lock on the folder of a run. The operating system releases it when the process ends for any reason."""

    def __init__(self, folder: Path, rank: int = 0) -> None:
        self.path = lock_of(folder, rank)
        self._lock = FileLock(self.path, thread_local=False)
        super().__init__()

    def acquire(self) -> bool:
        """Acquire the lock. Return False if another process, or another run in this process, holds it."""
        with suppress(Timeout), uninterrupted():
            self._lock.acquire(timeout=LOCK_TIMEOUT)
        return self.is_held

    @property
    def is_held(self) -> bool:
        """Whether this object holds the lock, in this process."""
        return self._lock.is_locked and not self.is_inherited

    def release(self) -> None:
        """Release the lock, if it is held, and remove its file. A forked process does neither: the lock belongs to its parent."""
        with uninterrupted():
            if self.is_held:
                with suppress(OSError):  # a remaining file is harmless: only the lock on it counts
                    self.path.unlink()
                self._lock.release()

    @contextmanager
    def held(self, refusal: InstrumentError) -> Iterator[None]:
        """Hold the lock inside the block. Raise `refusal` if any process writes to the folder."""
        if is_written(self.path.parent) or not self.acquire():
            raise refusal
        try:
            yield
        finally:
            self.release()


def is_locked(folder: Path, rank: int = 0) -> bool:
    """Return whether the process with this rank is writing to the folder of a run."""
    path = lock_of(folder, rank)
    if not path.exists():
        return False
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except (Timeout, OSError):  # OSError: the folder is not writable, so the state is unknown
        return True
    lock.release()
    return False


def is_written(folder: Path) -> bool:
    """Return whether any process is writing to the folder of a run."""
    ranks = (path.name.removeprefix(f"{LOCK}-") for path in folder.glob(f"{LOCK}-*"))
    return any(is_locked(folder, int(rank)) for rank in ["0", *ranks] if rank.isdigit())
