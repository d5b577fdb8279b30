"""What hooks make of a training step's time, where a run has steps with hooks and steps without to compare."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Hashable
from statistics import median
from typing import NamedTuple

from ..kinds.meter import usual_variance

WARM_UP = 3  # steps that are not counted: the first ones allocate
LEAST = 5  # steps of each sort, below which nothing is said
KEPT = 256  # of each sort, the latest
MOST_SORTS = 16
LOOK = 20  # steps between two looks
OTHERS = "others"
OF_A_MEDIAN = math.pi / 2  # its variance, over that of a mean of as many numbers


class Measured(NamedTuple):
    """What was found.

    Attributes:
        share: By which share of itself a step is longer, on average.
        error: The standard error of that.
        bare: What a step without hooks takes, in seconds.
    """

    share: float
    error: float
    bare: float


class Overhead:
    """Compares steps at which hooks were due with steps at which none was.

    Steps at which the same hooks were due are of one sort. What a sort takes is the median of its latest steps, so that a
    step in which the machine did something else does not count; how often it came says what it weighs.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[Hashable, Hashable], deque[float]] = {}
        self._counts: Counter[tuple[Hashable, Hashable]] = Counter()
        self._steps = 0
        self._looked_at = -LOOK
        self._measured: Measured | None = None

    def add(self, due: Hashable, seconds: float, beside: Hashable = ()) -> None:
        """A training step is over.

        Args:
            due: The hooks that had something to do in it; `()` for a step that nothing was done in.
            seconds: What it took, all that belongs to it included.
            beside: Hooks that had something to do and are not asked about: only steps with the same ones are compared.
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
        """By which share of itself a step is longer, on average over the steps so far; None where it was not measured."""
        found = self.measured()
        return None if found is None else found.share

    def measured(self) -> Measured | None:
        """What the steps say, as of the last look; None where there are too few of one sort."""
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
