"""Deferral of Ctrl-C and SIGTERM while the rows of a step are passed to the sink."""

from __future__ import annotations

# The functions of `signal` convert each handler to an enumeration, which takes ten times as long as to set it.
import _signal  # type: ignore[import-not-found]
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

SIGNALS = (_signal.SIGINT, _signal.SIGTERM)


@contextmanager
def deferred_signals() -> Iterator[None]:
    """Defer signals to the end of the block. A second signal is handled at once.

    Only signals with a Python handler are deferred, and only in the main thread, which is the only one that handles
    them.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: handler for number in SIGNALS if callable(handler := _signal.getsignal(number))}
    received: list[tuple[int, FrameType | None]] = []

    def note(number: int, frame: FrameType | None) -> None:
        if received:
            handlers[number](number, frame)
        received.append((number, frame))

    for number in handlers:
        _signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            _signal.signal(number, handler)
    if received:
        first, frame = received[0]
        handlers[first](first, frame)
