"""Collective operations of this package, which hooks of kind `collective` do not observe."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

_depth = threading.local()


@contextmanager
def own_collectives() -> Iterator[None]:
    """Mark the collective operations that this thread calls in the block, or in the decorated function, as those of this package."""
    _depth.count = getattr(_depth, "count", 0) + 1
    try:
        yield
    finally:
        _depth.count -= 1


def are_own_collectives() -> bool:
    return getattr(_depth, "count", 0) > 0
