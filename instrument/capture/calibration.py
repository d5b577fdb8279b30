"""The first steps of a run with a budget of time: steps with records held against steps without."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from ..kinds.live import LiveSite
from ..kinds.meter import Meter, hidden_factor

BLOCK, ENOUGH, MOST_CALIBRATING = 4, 18, 400


class Calibration:
    """Steps with records and steps without.

    Where schedules leave too few without, the sites that are due in every step look away in every other block of steps: they
    alone, so that nothing is missed that is seen seldom, and never in an evaluation.
    """

    def __init__(self, records: Sequence[LiveSite]) -> None:
        self.often = [live for live in records if (s := live.site.spec.schedule).every == 1 and s.steps is None]
        self.steps = 0
        self.is_away = False
        self.looking: list[tuple[float, float]] = []  # what a step took, and what the stopwatch said
        self.away: list[tuple[float, float]] = []
        self._in_block = 0

    def add(self, seconds: float, meter: Meter) -> None:
        """A step is over. The first one of a block still feels what was before it, and counts for nothing."""
        self.steps += 1
        recorded = any(live.records for live in meter.firings)
        if self._in_block and not (recorded and self.is_away):
            (self.looking if recorded else self.away).append((seconds, meter.seconds))
        self._in_block += 1
        if self._in_block >= BLOCK:
            self._in_block = 0
            self.look_away(not self.is_away and len(self.away) < len(self.looking))

    def look_away(self, away: bool) -> None:
        """From the next step on."""
        self.is_away = away
        for live in self.often:
            live.away = away

    @property
    def is_over(self) -> bool:
        """Whether there are enough of both; hooks that are due seldom are not waited for for ever."""
        return min(len(self.looking), len(self.away)) >= ENOUGH or self.steps >= MOST_CALIBRATING

    @property
    def steady(self) -> float:
        """What the stopwatch says of a step, in seconds, where nothing is recorded."""
        return median(told for _, told in self.away) if self.away else 0.0

    @property
    def factor(self) -> float:
        """What recording costs over what the stopwatch says of it."""
        looking, away = ([seconds for seconds, _ in steps] for steps in (self.looking, self.away))
        told = median(told for _, told in self.looking) - self.steady if looking else 0.0
        return hidden_factor(looking, away, told)
