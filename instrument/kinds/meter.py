"""What hooks take of a training's time, in all and at each site; a probe has one where there is a budget."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .live import LiveSite


USUAL_FACTOR, FACTOR_SPREAD, MOST_FACTOR = 1.25, 0.15, 5.0  # as three networks had it, measured for minutes

HELD_UP = 5.0  # times the median deviation from the median, beyond which a step was held up


def hidden_factor(looking: Sequence[float], away: Sequence[float], told: float) -> float:
    """What hooks cost over what a stopwatch in them says of it.

    They also push other things out of the caches, which makes the rest of a step longer. That is the difference of two times
    that are much larger, so where it is uncertain it is drawn to what is usual: the mean of both, weighted by their precision.

    Args:
        looking: Seconds of steps with hooks.
        away: Seconds of such steps without.
        told: What the stopwatch says of a step with hooks, beyond what it says of one without.
    """
    if min(len(looking), len(away)) < 3 or told <= 0.0:
        return USUAL_FACTOR
    found = (median(looking) - median(away)) / told
    variance = (usual_variance(looking) / len(looking) + usual_variance(away) / len(away)) / told**2 + 1e-9
    usual, own = 1.0 / FACTOR_SPREAD**2, 1.0 / variance
    return min(max((USUAL_FACTOR * usual + found * own) / (usual + own), 1.0), MOST_FACTOR)


def usual_variance(seconds: Collection[float]) -> float:
    """The variance of what steps took, without those in which the machine did something else, as a median has it."""
    middle = median(seconds)
    usual = median(abs(taken - middle) for taken in seconds)
    kept = [taken for taken in seconds if abs(taken - middle) <= HELD_UP * usual]
    mean = fmean(kept)
    return fmean((taken - mean) ** 2 for taken in kept)


class Meter:
    """A stopwatch that runs while hooks do; what runs inside another hook is not counted twice.

    Attributes:
        seconds: In hooks, in all.
        at: Seconds in the action of each site; they are part of `seconds`.
        firings: How often each site acted.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self.at: Counter[LiveSite] = Counter()
        self.firings: Counter[LiveSite] = Counter()
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
