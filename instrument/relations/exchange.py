"""Exchanges short values between processes without waiting: each writes to the store of the process group, and rank 0 reads it.

A process that has ended leaves no value. Collective operations would wait for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from itertools import count

import torch.distributed as dist

from ..runtime.restarts import store_of_restart

MAX_PENDING = 20  # steps
_WAIT = timedelta(seconds=2)  # for the values of the last steps
_numbers = count()


def has_processes() -> bool:
    """Return whether a process group has several processes."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


class Exchange:
    """The values of all processes in each step. Create it in all processes in the same order, with an initialized process group."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._prefix = f"instrument/relations/{next(_numbers)}"
        self._store = store_of_restart()
        self._pending: list[int] = []  # the steps whose values rank 0 has not read

    def post(self, step: int, value: bytes) -> Iterator[tuple[int, list[bytes]]]:
        """Send the value of this process. Yield the steps whose values are complete, and the values by rank; only on rank 0."""
        if len(self._pending) >= MAX_PENDING:  # another process sends nothing
            return
        try:
            self._store.set(self._key(step, self.rank), value)
            if not self.rank:
                self._pending.append(step)
                yield from self._complete()
        except RuntimeError:  # the process with the store has ended
            return

    def finish(self) -> Iterator[tuple[int, list[bytes]]]:
        """Yield the steps whose values become complete within 2 seconds; only on rank 0."""
        try:
            if self._pending:
                self._store.wait([self._key(self._pending[-1], rank) for rank in range(self.size)], _WAIT)
                yield from self._complete()
        except RuntimeError:  # another process has sent nothing, or the process with the store has ended
            return

    def _complete(self) -> Iterator[tuple[int, list[bytes]]]:
        for at in [*self._pending]:
            keys = [self._key(at, rank) for rank in range(self.size)]
            if not self._store.check(keys):
                return
            values = [self._store.get(key) for key in keys]
            self._pending.remove(at)
            for key in keys:
                self._store.delete_key(key)
            yield at, values

    def _key(self, step: int, rank: int) -> str:
        return f"{self._prefix}/{step}/{rank}"
