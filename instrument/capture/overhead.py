"""Measurement of the overhead of hooks, by comparison of steps with and without scheduled hooks."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Hashable
from statistics import median
from typing import NamedTuple

from ..kinds.hook_timer import usual_variance

WARM_UP = 3  # steps that are not counted, since the first ones allocate memory
LEAST = 5  # the minimum number of steps of each type
KEPT = 256  # the latest durations of each type
MOST_SORTS = 16
LOOK = 20  # steps between two evaluations of the measurements
OTHERS = "others"
OF_A_MEDIAN = math.pi / 2  # the variance of a median relative to that of a mean of as many numbers


class Measured(NamedTuple):
    """A measured overhead.

    Attributes:
        share: The relative overhead, as the mean over all steps.
        error: Its standard error.
        bare: The duration of a step without hooks, in seconds.
    """

    share: float
    error: float
    bare: float


class Overhead:
    """Compares the durations of steps with and without scheduled hooks.

    Steps with the same scheduled hooks are of one type. The duration of a type is the median of its latest steps, so
    that interrupted steps have no effect. Types are weighted by their frequency.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[Hashable, Hashable], deque[float]] = {}
        self._counts: Counter[tuple[Hashable, Hashable]] = Counter()
        self._steps = 0
        self._looked_at = -LOOK
        self._measured: Measured | None = None

    def add(self, due: Hashable, seconds: float, beside: Hashable = ()) -> None:
        """Add a training step.

        Args:
            due: The hooks that ran in it; `()` if none did.
            seconds: Its total duration.
            beside: Hooks that ran but are not measured. Only steps with the same ones are compared.
        """
        self._steps += 1
        if self._steps <= WARM_UP:
            return
        sort = (beside, due)
        if sort not in self._seconds and len(self._seconds) >= MOST_SORTS and sort != ((), ()):
            sort = (OTHERS if beside else (), OTHERS)
        self._seconds.setdefault(sort, deque(maxlen=KEPT)).append(seconds)
        self._counts[sort] += 1

    @property
    def share(self) -> float | None:
        """The relative overhead, as the mean over all steps so far; None if it was not measured."""
        found = self.measured()
        return None if found is None else found.share

    def measured(self) -> Measured | None:
        """Return the overhead at the last check; None if there were too few steps of a type."""
        if self._steps - self._looked_at >= LOOK:
            self._looked_at = self._steps
            self._measured = self._look()
        return self._measured

    def _look(self) -> Measured | None:
        bare = {
            beside: median(seconds)
            for (beside, due), seconds in self._seconds.items()
            if due == () and len(seconds) >= LEAST
        }
        counts = {sort: count for sort, count in self._counts.items() if sort[0] in bare}
        hooked = Counter[Hashable]()
        for (beside, due), count in counts.items():
            hooked[beside] += count if due != () else 0
        if hooked.total() < LEAST:
            return None
        total = sum(count * bare[beside] for (beside, _), count in counts.items())
        extra, variance = 0.0, 0.0
        for (beside, due), seconds in self._seconds.items():
            if beside in bare:
                weight = counts.get((beside, due), 0) if due != () else hooked[beside]
                extra += weight * (median(seconds) - bare[beside])
                variance += weight**2 * OF_A_MEDIAN * usual_variance(seconds) / len(seconds)
        return Measured(extra / total, math.sqrt(variance) / total, total / sum(counts.values()))
