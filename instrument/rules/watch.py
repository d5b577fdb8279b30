"""Rules on any statistic of a hook, or on a metric."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..spec.rules import WatchRule
from .rule import BoundsRule, CatalogueRule, Firing
from .step_rows import Bounds, Location, StepRows

ADVICE = "Compare it with the steps before, and repeat them with more hooks: python -m instrument.replay."


class WatchStatistic(BoundsRule[WatchRule]):
    """A statistic of a hook is above or below a number. Of several values in a step, the most extreme one counts."""

    what = "watched statistic"
    advice = ADVICE

    def __init__(self, spec: WatchRule) -> None:
        super().__init__(spec)
        self.statistics = (spec.stat,)
        self.above, self.below = spec.above, spec.below
        self.merge = np.fmin if spec.above is None else np.fmax

    def reads(self, location: Location) -> bool:
        return location.hook in self.spec.watch


class WatchMetric(CatalogueRule[WatchRule]):
    """A metric of training steps is above or below a number."""

    what = "watched metric"
    advice = ADVICE

    def __init__(self, spec: WatchRule) -> None:
        super().__init__(spec)
        self._times = 0

    def update(self, rows: StepRows) -> Iterator[Firing]:
        value = rows.metric(self.spec.stat)
        if not rows.is_training or value is None:
            return
        is_above = self.spec.above is not None and value > self.spec.above
        bound = self.spec.above if is_above else self.spec.below
        holds = is_above or (self.spec.below is not None and value < self.spec.below)
        self._times = self._times + 1 if holds else 0
        if self._times == self.spec.for_:
            side = "above" if is_above else "below"
            yield Firing(f"{self.spec.stat} {value:.4g}, {side} {bound:g}", value, bound)

    def quiet_bounds(self, rows: StepRows) -> Bounds | None:  # noqa: ARG002
        low = -math.inf if self.spec.below is None else self.spec.below
        high = math.inf if self.spec.above is None else self.spec.above
        return None if self._times else Bounds(self.spec.stat, low, high)

    def state_dict(self) -> dict[str, Any]:
        return {"times": self._times}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._times = state["times"]
