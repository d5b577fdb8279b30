"""What hooks make of a training step's time, where a run has steps with hooks and steps without to compare."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from statistics import median

WARM_UP = 3  # steps that are not counted: the first ones allocate
LEAST = 5  # steps of each sort, below which nothing is said
KEPT = 64  # of each sort, the latest
MOST_SORTS = 16
LOOK = 20  # steps between two looks


class Overhead:
    """Compares steps at which hooks were due with steps at which none was.

    Steps at which the same hooks were due are of one sort. What a sort takes is the median of its latest steps, so that a
    step in which the machine did something else does not count; how often it came says what it weighs.
    """

    def __init__(self) -> None:
        self._seconds: dict[Hashable, deque[float]] = {}
        self._counts: Counter[Hashable] = Counter()
        self._steps = 0
        self._looked_at = 0
        self._share: float | None = None

    def add(self, due: tuple[str, ...], seconds: float) -> None:
        """A training step is over.

        Args:
            due: The hooks that had something to do in it; none for a step that nothing was done in.
            seconds: What it took, all that belongs to it included.
        """
        self._steps += 1
        if self._steps <= WARM_UP:
            return
        sort: Hashable = due if due in self._seconds or len(self._seconds) < MOST_SORTS or not due else "others"
        self._seconds.setdefault(sort, deque(maxlen=KEPT)).append(seconds)
        self._counts[sort] += 1

    @property
    def share(self) -> float | None:
        """By which share of itself a step is longer, on average over the steps so far; None where it was not measured."""
        if self._share is None or self._steps - self._looked_at >= LOOK:
            self._looked_at = self._steps
            self._share = self._measured()
        return self._share

    def _measured(self) -> float | None:
        steps, without = self._counts.total(), self._counts[()]
        if min(without, steps - without) < LEAST:
            return None
        bare = median(self._seconds[()])
        extra = sum((median(times) - bare) * self._counts[sort] for sort, times in self._seconds.items())
        return extra / (steps * bare)
