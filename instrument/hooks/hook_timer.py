"""Measurement of the time that hooks take, in total and per site. Used if there is a budget."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, median
from typing import Any

# Measured with three networks, for several minutes each.
USUAL_FACTOR, FACTOR_SPREAD, MAX_FACTOR = 1.25, 0.15, 5.0

# A step that deviates from the median by more than this multiple of the median deviation was interrupted.
OUTLIER_DEVIATIONS = 5.0


def overhead_factor(recording: Sequence[float], paused: Sequence[float], measured: float) -> float:
    """Estimate the ratio of the real cost of hooks to the time measured inside them.

    Hooks also evict data from the caches, which slows down the rest of a step. The real cost is the difference of two
    much larger durations and therefore uncertain. The result is the mean of the measured and the usual ratio, weighted
    by their precision.

    Args:
        recording: Durations of steps with hooks, in seconds.
        paused: Durations of comparable steps without hooks, in seconds.
        measured: The time measured inside the hooks per step, in seconds, minus that of a step without hooks.

    Returns:
        The ratio, from 1 to `MAX_FACTOR`.
    """
    if min(len(recording), len(paused)) < 3 or measured <= 0.0:
        return USUAL_FACTOR
    ratio = (median(recording) - median(paused)) / measured
    variance = (
        robust_variance(recording) / len(recording) + robust_variance(paused) / len(paused)
    ) / measured**2 + 1e-9
    usual_weight, ratio_weight = 1.0 / FACTOR_SPREAD**2, 1.0 / variance
    return min(
        max((USUAL_FACTOR * usual_weight + ratio * ratio_weight) / (usual_weight + ratio_weight), 1.0), MAX_FACTOR
    )


def robust_variance(seconds: Collection[float]) -> float:
    """Return the variance of step durations without outliers, which do not affect a median."""
    middle = median(seconds)
    median_deviation = median(abs(duration - middle) for duration in seconds)
    regular = [duration for duration in seconds if abs(duration - middle) <= OUTLIER_DEVIATIONS * median_deviation]
    mean = fmean(regular)
    return fmean((duration - mean) ** 2 for duration in regular)


class HookTimer:
    """A timer for hooks, in seconds. Nested hooks are counted once. `seconds` includes the `action_seconds` of each site."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.action_seconds: Counter[Any] = Counter()
        self.firings: Counter[Any] = Counter()
        self._depth = 0
        self._started_at = 0.0

    def __enter__(self) -> None:
        if not self._depth:
            self._started_at = time.perf_counter()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.seconds += time.perf_counter() - self._started_at

    @property
    def is_running(self) -> bool:
        return self._depth > 0

    def lap(self) -> None:
        """Add the time of the current measurement so far to the total."""
        if self._depth:
            now = time.perf_counter()
            self.seconds += now - self._started_at
            self._started_at = now

    @contextmanager
    def measure_time(self, attached: Any) -> Iterator[None]:
        started_at = time.perf_counter()
        with self:
            yield
        self.action_seconds[attached] += time.perf_counter() - started_at  # type: ignore[assignment]

    @contextmanager
    def measure_action(self, attached: Any) -> Iterator[None]:
        """Measure the action of a site, and count the firing."""
        with self.measure_time(attached):
            yield
        self.firings[attached] += 1

    def reset(self) -> None:
        self.seconds = 0.0
        self.action_seconds.clear()
        self.firings.clear()
