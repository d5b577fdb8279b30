"""Bounded memory for copies of tensors, used again and again."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

GRAIN = 4096  # bytes: sizes are rounded up to it, so that tensors of about one size share their rooms
PATIENCE = 0.5  # seconds after which somebody who waits looks whether anybody still works


class Pool:
    """Rooms for bytes, of which no more than a limit are in use or kept at any time.

    A tensor larger than the limit gets a room as soon as no other is in use.

    Args:
        limit: Bytes.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._idle: dict[tuple[int, bool], list[Tensor]] = {}
        self._idle_bytes = 0
        self._changed = threading.Condition()

    def take(self, size: int, *, pinned: bool, wait: Callable[[], None] | None) -> Tensor | None:
        """A room of at least `size` bytes, uint8.

        Args:
            size: Bytes that are needed.
            pinned: Whether a GPU is to write there.
            wait: Called while there is no room, now and then; it raises where none will come. None: do not wait.

        Returns:
            The room; None where there is none and nobody waits.
        """
        size = max(1, -(-size // GRAIN)) * GRAIN
        with self._changed:
            while self.used and self.used + size > self.limit:
                if wait is None:
                    return None
                wait()
                self._changed.wait(PATIENCE)
            self.used += size
            rooms = self._idle.get((size, pinned))
            if rooms:
                self._idle_bytes -= size
                return rooms.pop()
            while self._idle_bytes and self.used + self._idle_bytes > self.limit:
                self._forget_one()
        with torch.inference_mode(False):
            return torch.empty(size, dtype=torch.uint8, pin_memory=pinned)

    def give_back(self, room: Tensor) -> None:
        """A room that is not in use any more."""
        size = room.numel()
        with self._changed:
            self.used -= size
            if self.used + self._idle_bytes + size <= self.limit:
                self._idle.setdefault((size, room.is_pinned()), []).append(room)
                self._idle_bytes += size
            self._changed.notify_all()

    def _forget_one(self) -> None:
        """Let go of an idle room, of the size that was not asked for the longest."""
        key = next(iter(self._idle))
        self._idle[key].pop()
        self._idle_bytes -= key[0]
        if not self._idle[key]:
            del self._idle[key]
