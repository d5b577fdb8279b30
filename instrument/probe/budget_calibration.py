"""Calibration of a time budget: comparison of the first steps with and without record hooks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ..hooks.attached_hook import AttachedHook
from ..hooks.hook_timer import HookTimer, overhead_factor

BLOCK, MIN_STEPS_OF_EACH, MAX_STEPS = 4, 18, 400


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

    def add(self, seconds: float, timer: HookTimer[AttachedHook]) -> None:
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
