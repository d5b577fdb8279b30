"""Measurement of the overhead of hooks, by comparison of steps with and without scheduled hooks."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Hashable
from statistics import median
from typing import NamedTuple

from ..hooks.hook_timer import robust_variance

WARM_UP = 3  # steps that are not counted, since the first ones allocate memory
MIN_STEPS = 5  # the minimum number of steps of each type
MAX_DURATIONS = 256  # the latest durations of each type
MAX_STEP_TYPES = 16
CHECK_INTERVAL = 20  # steps between two evaluations of the measurements
OTHERS = "others"
MEDIAN_VARIANCE_RATIO = math.pi / 2  # the variance of a median relative to that of a mean of as many numbers


class MeasuredOverhead(NamedTuple):
    """A measured overhead.

    Attributes:
        relative: The relative overhead, as the mean over all steps.
        error: Its standard error.
        baseline: The duration of a step without hooks, in seconds.
    """

    relative: float
    error: float
    baseline: float


class Overhead:
    """Compares the durations of steps with and without scheduled hooks.

    Steps with the same scheduled hooks are of one type. The duration of a type is the median of its latest steps, so
    that interrupted steps have no effect. Types are weighted by their frequency.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[Hashable, Hashable], deque[float]] = {}
        self._counts: Counter[tuple[Hashable, Hashable]] = Counter()
        self._steps = 0
        self._checked_at = -CHECK_INTERVAL
        self._measured: MeasuredOverhead | None = None

    def add(
        self, scheduled: Hashable, seconds: float, unmeasured: Hashable = (), *, has_pending_rows: bool = False
    ) -> None:
        """Add a training step.

        Args:
            scheduled: The hooks that ran in it; `()` if none did.
            seconds: Its total duration.
            unmeasured: Hooks that ran but are not measured. Only steps with the same ones are compared.
            has_pending_rows: Whether the step wrote rows of the previous step.
        """
        self._steps += 1
        if self._steps <= WARM_UP:
            return
        step_type = (unmeasured, (scheduled, "pending rows") if has_pending_rows else scheduled)
        if step_type not in self._seconds and len(self._seconds) >= MAX_STEP_TYPES and step_type != ((), ()):
            step_type = (OTHERS if unmeasured else (), OTHERS)
        self._seconds.setdefault(step_type, deque(maxlen=MAX_DURATIONS)).append(seconds)
        self._counts[step_type] += 1

    @property
    def relative(self) -> float | None:
        """The relative overhead, as the mean over all steps so far; None if it was not measured."""
        overhead = self.measured()
        return None if overhead is None else overhead.relative

    def measured(self) -> MeasuredOverhead | None:
        """Return the overhead at the last check; None if there were too few steps of a type."""
        if self._steps - self._checked_at >= CHECK_INTERVAL:
            self._checked_at = self._steps
            self._measured = self._evaluate()
        return self._measured

    def _evaluate(self) -> MeasuredOverhead | None:
        baseline = {
            unmeasured: median(seconds)
            for (unmeasured, scheduled), seconds in self._seconds.items()
            if scheduled == () and len(seconds) >= MIN_STEPS
        }
        counts = {step_type: count for step_type, count in self._counts.items() if step_type[0] in baseline}
        hooked = Counter[Hashable]()
        for (unmeasured, scheduled), count in counts.items():
            hooked[unmeasured] += count if scheduled != () else 0
        if hooked.total() < MIN_STEPS:
            return None
        total = sum(count * baseline[unmeasured] for (unmeasured, _), count in counts.items())
        extra, variance = 0.0, 0.0
        for (unmeasured, scheduled), seconds in self._seconds.items():
            if unmeasured in baseline:
                weight = counts.get((unmeasured, scheduled), 0) if scheduled != () else hooked[unmeasured]
                extra += weight * (median(seconds) - baseline[unmeasured])
                variance += weight**2 * MEDIAN_VARIANCE_RATIO * robust_variance(seconds) / len(seconds)
        return MeasuredOverhead(extra / total, math.sqrt(variance) / total, total / sum(counts.values()))
