"""What hooks take of a training's time, in all and at each site; a probe has one where there is a budget."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .live import LiveSite


class Meter:
    """A stopwatch that runs while hooks do; what runs inside another hook is not counted twice.

    Attributes:
        seconds: In hooks, in all.
        at: Seconds in the action of each site; they are part of `seconds`.
        firings: How often each site acted.
        paused: Whether records look away for a step, to see what the step takes without them.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.at: Counter[LiveSite] = Counter()
        self.firings: Counter[LiveSite] = Counter()
        self.paused = False
        self._depth = 0
        self._began = 0.0

    def __enter__(self) -> None:
        if not self._depth:
            self._began = time.perf_counter()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.seconds += time.perf_counter() - self._began

    def lap(self) -> None:
        """Add up what was taken so far, in the middle of it."""
        if self._depth:
            now = time.perf_counter()
            self.seconds += now - self._began
            self._began = now

    @contextmanager
    def acting(self, live: LiveSite) -> Iterator[None]:
        """The action of a site."""
        began = time.perf_counter()
        with self:
            yield
        self.at[live] += time.perf_counter() - began  # type: ignore[assignment]
        self.firings[live] += 1

    def reset(self) -> None:
        """Count anew."""
        self.seconds = 0.0
        self.at.clear()
        self.firings.clear()
