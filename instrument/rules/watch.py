"""Rules on any statistic of a hook, or on a metric."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ..config.rules import WatchRule
from ..errors import Problem, similar_names
from .rule import Bounds, BoundsRule, CatalogueRule, Firing
from .step_rows import Location, StepRows

ADVICE = (
    "Compare the value with those of earlier steps, and repeat these steps with more hooks. For runs of python -m instrument, use "
    "python -m instrument.replay."
)


class WatchStatistic(BoundsRule[WatchRule]):
    """A statistic of a hook is above or below a number. Of several values in a step, the most extreme one counts."""

    advice = ADVICE

    def __init__(self, spec: WatchRule) -> None:
        super().__init__(spec)
        self.what = spec.name
        self.statistics = (spec.stat,)
        self.merge = np.fmin if spec.above is None else np.fmax

    def reads(self, location: Location) -> bool:
        return location.hook in self.spec.watch


class WatchMetric(CatalogueRule[WatchRule]):
    """A metric of training steps is above or below a number."""

    advice = ADVICE
    saved = ("times", "names")

    def __init__(self, spec: WatchRule) -> None:
        super().__init__(spec)
        self.what = spec.name
        self._times = 0
        self._names: dict[str, str] = {}  # the metrics until the watched one has a value, with a phase of each

    def update(self, rows: StepRows) -> Iterator[Firing]:
        value = rows.metric(self.spec.stat)
        if not self._is_read and rows.metrics is not None:
            named = {name: rows.phase for name, number in rows.metrics.items() if number is not None}
            self._names = self._names | named if rows.is_training else named | self._names
        if not rows.is_training or value is None:
            return
        is_above = self.spec.above is not None and value > self.spec.above
        bound = self.spec.above if is_above else self.spec.below
        holds = is_above or (self.spec.below is not None and value < self.spec.below)
        self._times = self._times + 1 if holds else 0
        if self._times == self.spec.for_:
            side = "above" if is_above else "below"
            yield Firing(f"{self.spec.stat} {value:.4g}, {side} {bound:g}", value, bound)

    def bounds(self) -> Bounds | None:
        low = -math.inf if self.spec.below is None else self.spec.below
        high = math.inf if self.spec.above is None else self.spec.above
        return Bounds(self.spec.stat, low, high) if self._is_read and not self._times else None

    @property
    def _is_read(self) -> bool:
        """Whether the metric had a value in a training step."""
        return self._names.get(self.spec.stat) == "train"

    def unread(self) -> str:
        if self._is_read or not self._names:
            return ""
        message = "no training step has a value of this metric"
        if self.spec.stat in self._names:
            message += f", only the phase {self._names[self.spec.stat]!r}"
        names = [name for name, phase in self._names.items() if phase == "train"]
        where, similar = f"rules.{self.spec.name}.stat", similar_names(self.spec.stat, names)
        return str(Problem(where, message, self.spec.stat, names, similar))
