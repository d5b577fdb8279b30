"""Functions that wait for another thread or process, also on a slow machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import instrument

TIMEOUT = 1200.0
"""Timeout of all waiting in tests, in seconds; long enough for a slow machine."""


class Process(Protocol):
    """A process whose `poll` returns its exit code, or None while it runs."""

    def poll(self) -> int | None: ...


def wait_until(condition: Callable[[], object], process: Process | None = None) -> None:
    """Wait until a condition, which is checked every 10 ms, holds.

    Raises:
        AssertionError: The process ended first, or the condition does not hold after `TIMEOUT` seconds.
    """
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        if process is not None:
            assert process.poll() is None, "the process has ended"
        assert time.monotonic() < deadline, "timeout: the condition is still false"
        time.sleep(0.01)


def wait_until_training(process: Process, folder: Path = Path("out")) -> None:
    """Wait until a run has recorded the metrics of a step."""
    wait_until(lambda: list(folder.glob("journal/metrics-*")) and len(instrument.load(folder).metrics), process)
