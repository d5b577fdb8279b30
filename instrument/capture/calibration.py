"""Calibration of a time budget: comparison of the first steps with and without record hooks."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ..kinds.attached import LiveSite
from ..kinds.hook_timer import Meter, hidden_factor

BLOCK, ENOUGH, MOST_CALIBRATING = 4, 18, 400


class Calibration:
    """Compares steps with and without record hooks.

    If schedules leave too few steps without, the sites that are scheduled in every step are paused in every second
    block of steps. Sites with rare schedules are never paused, and no site is paused in an evaluation.
    """

    def __init__(self, records: Sequence[LiveSite]) -> None:
        self.often = [live for live in records if (s := live.site.spec.schedule).every == 1 and s.steps is None]
        self.steps = 0
        self.is_away = False
        self.looking: list[tuple[float, float]] = []  # duration of a step, and the time measured in hooks
        self.away: list[tuple[float, float]] = []
        self._in_block = 0

    def add(self, seconds: float, meter: Meter) -> None:
        """Add a completed step. The first one of a block is still affected by the previous block and is not counted."""
        self.steps += 1
        recorded = any(live.records for live in meter.firings)
        if self._in_block and not (recorded and self.is_away):
            (self.looking if recorded else self.away).append((seconds, meter.seconds))
        self._in_block += 1
        if self._in_block >= BLOCK:
            self._in_block = 0
            self.look_away(not self.is_away and len(self.away) < len(self.looking))

    def look_away(self, away: bool) -> None:
        """Pause or resume the sites from the next step on."""
        self.is_away = away
        for live in self.often:
            live.away = away

    @property
    def is_over(self) -> bool:
        """Whether there are enough steps of both types. A limit ends the comparison if hooks are rarely scheduled."""
        return min(len(self.looking), len(self.away)) >= ENOUGH or self.steps >= MOST_CALIBRATING

    @property
    def steady(self) -> float:
        """The time measured in hooks in a step that records nothing, in seconds."""
        return median(told for _, told in self.away) if self.away else 0.0

    @property
    def factor(self) -> float:
        """The ratio of the real cost of recording to the time measured in hooks."""
        looking, away = ([seconds for seconds, _ in steps] for steps in (self.looking, self.away))
        told = median(told for _, told in self.looking) - self.steady if looking else 0.0
        return hidden_factor(looking, away, told)
