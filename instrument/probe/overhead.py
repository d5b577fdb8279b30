"""Measurement of the overhead of hooks, by comparison of steps with and without scheduled hooks."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Hashable, Sequence
from statistics import median
from typing import NamedTuple

from ..hooks.attached_hook import AttachedHook
from ..hooks.clock import HookTimer, overhead_factor, robust_variance

WARM_UP = 3  # steps that are not counted, since the first ones allocate memory
MIN_STEPS = 5  # the minimum number of steps of each type
MAX_DURATIONS = 256  # the latest durations of each type
MAX_STEP_TYPES = 16
CHECK_INTERVAL = 20  # steps between two evaluations of the measurements
OTHERS = "others"
BLOCK, MIN_STEPS_OF_EACH, MAX_STEPS = 4, 18, 400  # of a calibration
MEDIAN_VARIANCE_RATIO = math.pi / 2  # the variance of a median relative to that of a mean of as many numbers


class MeasuredOverhead(NamedTuple):
    """The relative overhead as the mean over all steps, its standard error, and the seconds of a step without hooks."""

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
            unmeasured: Hooks that ran but are not measured. Only steps with the same ones are compared.
            has_pending_rows: Whether the step wrote rows of the previous step.
        """
        self._steps += 1
        if self._steps <= WARM_UP:
            return
        step_type = (unmeasured, (scheduled, "pending rows") if has_pending_rows else scheduled)
        if step_type not in self._seconds:
            if len(self._seconds) >= MAX_STEP_TYPES and step_type != ((), ()):
                step_type = (OTHERS if unmeasured else (), OTHERS)
            self._seconds.setdefault(step_type, deque(maxlen=MAX_DURATIONS))
        self._seconds[step_type].append(seconds)
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


class Calibration:
    """Compares steps with and without record hooks.

    If schedules leave too few steps without, the sites that are scheduled in every step are paused in every second
    block of steps. Sites with rare schedules are never paused, and no site is paused in an evaluation.
    """

    def __init__(self, records: Sequence[AttachedHook]) -> None:
        self.always_scheduled = [
            attached for attached in records if (s := attached.site.spec.schedule).every == 1 and s.steps is None
        ]
        self.steps = 0
        self.is_paused = False
        self.recording: list[tuple[float, float]] = []  # duration of a step, and the time measured in hooks
        self.paused: list[tuple[float, float]] = []
        self._in_block = 0

    def add(self, seconds: float, timer: HookTimer) -> None:
        """Add a completed step. The first one of a block is still affected by the previous block and is not counted."""
        self.steps += 1
        recorded = any(attached.is_record_hook for attached in timer.firings)
        if self._in_block and not (recorded and self.is_paused):
            (self.recording if recorded else self.paused).append((seconds, timer.seconds))
        self._in_block += 1
        if self._in_block >= BLOCK:
            self._in_block = 0
            self.set_paused(not self.is_paused and len(self.paused) < len(self.recording))

    def set_paused(self, paused: bool) -> None:
        """Pause or resume the sites from the next step on."""
        self.is_paused = paused
        for attached in self.always_scheduled:
            attached.is_paused = paused

    @property
    def is_complete(self) -> bool:
        """Whether there are enough steps of both types. A limit ends the comparison if hooks are rarely scheduled."""
        return min(len(self.recording), len(self.paused)) >= MIN_STEPS_OF_EACH or self.steps >= MAX_STEPS

    @property
    def baseline_seconds(self) -> float:
        """The time measured in hooks in a step that records nothing, in seconds."""
        return median(measured for _, measured in self.paused) if self.paused else 0.0

    @property
    def factor(self) -> float:
        """The ratio of the real cost of recording to the time measured in hooks."""
        recording, paused = ([seconds for seconds, _ in steps] for steps in (self.recording, self.paused))
        measured = median(measured for _, measured in self.recording) - self.baseline_seconds if recording else 0.0
        return overhead_factor(recording, paused, measured)
