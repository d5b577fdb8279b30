"""A bounded pool of reusable memory for copies of tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import Tensor

# In bytes. Sizes are rounded up to it, so that tensors of similar size reuse the same buffers.
SIZE_STEP = 4096
CHECK_SECONDS = 0.5  # seconds between two checks while waiting for a buffer


class Pool:
    """Byte buffers with a limit on the total size of used and idle ones.

    A tensor larger than the limit gets a buffer as soon as no other one is in use.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._idle: dict[tuple[int, bool], list[Tensor]] = {}
        self._idle_bytes = 0
        self._lock = threading.Lock()  # a signal cannot arrive between the acquisition of a plain lock and its block
        self._changed = threading.Condition(self._lock)

    def take(self, size: int, *, pinned: bool, wait: Callable[[], None] | None) -> Tensor | None:
        """Return a buffer of at least `size` bytes, dtype uint8.

        Until one is available, `wait` is called repeatedly, and may raise an exception. Without `wait`, the result is then None.
        """
        size = max(1, -(-size // SIZE_STEP)) * SIZE_STEP
        with self._lock:
            while self.used and self.used + size > self.limit:
                if wait is None:
                    return None
                wait()
                self._changed.wait(CHECK_SECONDS)
            self.used += size
            buffers = self._idle.get((size, pinned))
            if buffers:
                self._idle_bytes -= size
                return buffers.pop()
            while self._idle_bytes and self.used + self._idle_bytes > self.limit:
                key = next(iter(self._idle))  # the size that has been unused the longest
                self._idle[key].pop()
                self._idle_bytes -= key[0]
                if not self._idle[key]:
                    del self._idle[key]
        with torch.inference_mode(False):
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned)

    def release(self, buffer: Tensor) -> None:
        """Return a buffer to the pool."""
        size = buffer.numel()
        with self._lock:
            self.used -= size
            if self.used + self._idle_bytes + size <= self.limit:
                self._idle.setdefault((size, buffer.is_pinned()), []).append(buffer)
                self._idle_bytes += size
            self._changed.notify_all()
