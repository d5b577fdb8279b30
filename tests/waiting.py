"""Waiting for what another thread or process does, however slow the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import instrument

HANGS = 1200.0
"""Seconds after which a test takes what it waits for to hang; on a machine that is only slow, it comes long before."""


class Process(Protocol):
    """What can tell whether it still runs."""

    def poll(self) -> int | None: ...


def until(holds: Callable[[], object], process: Process | None = None) -> None:
    """Wait until a condition holds; a process that is to make it hold, and ends before, fails the test at once."""
    deadline = time.monotonic() + HANGS
    while not holds():
        if process is not None:
            assert process.poll() is None, "the process has ended"
        assert time.monotonic() < deadline, "it did not come to hold"
        time.sleep(0.01)


def until_it_trains(process: Process, folder: Path = Path("out")) -> None:
    """Wait until a run has rows of a step."""
    until(lambda: list(folder.glob("journal/metrics-*")) and len(instrument.load(folder).metrics), process)
