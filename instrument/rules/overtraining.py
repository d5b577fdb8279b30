"""Rule: the training continues after the evaluation loss stopped improving."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator

import numpy as np
from pydantic import Field

from ..config.rules import PersistentRule
from ..fields.field_types import Count, NonNegative
from .rule import Bounds, CatalogueRule, Firing
from .step_rows import FloatArray, StepRows


class OvertrainingRule(PersistentRule):
    """The evaluation loss is worse than its minimum in many evaluations in succession.

    Both numbers are those of SageMaker Debugger (Overtraining, `patience_validation` and `delta`). In a training that has converged, the
    lowest loss is an extreme value, so that one of two conditions also has to hold. The lowest of the last `for` losses is above it by more
    than 3 times the sum of all decreases in between. Or the losses after it rise by more than 4 standard deviations in the test of H. B.
    Mann (Nonparametric tests against trend, 1945), whose variance includes the correlation of successive losses (S. Yue and C. Wang, 2004).
    None of 400 series of noise reaches this. The loss also has to rise by a tenth of the decrease from the first evaluation to the minimum.
    If a loss was negative, the fraction is that of this decrease, instead of the minimum.
    """

    above: NonNegative = Field(0.01, description="The loss is above its minimum by more than this fraction.")
    for_: Count = Field(10, alias="for", description="In how many evaluations in succession.")


MAX_LOSSES = 300  # after the minimum that are compared
FALLS = 3.0  # times the sum of all decreases
TREND, FEWEST = 4.0, 10  # standard deviations, and the number of losses that can reach them


class Overtraining(CatalogueRule[OvertrainingRule], name="overtraining"):
    source = "evaluations"
    saved = ("lowest", "at", "first", "times", "later")
    what = "overtraining"
    stage = "learning"
    advice = "Stop earlier: use the checkpoint of the lowest evaluation loss."
    requires = "evaluations: set train.eval_every"

    def __init__(self, spec: OvertrainingRule) -> None:
        super().__init__(spec)
        self._lowest, self._at = math.inf, 0
        self._first: float | None = None
        self._times = 0
        self._later: list[float] = []  # the losses since the minimum

    def update(self, rows: StepRows) -> Iterator[Firing]:
        loss = rows.metric("loss")
        if rows.phase != "eval" or loss is None or not math.isfinite(loss):
            return
        self._first = loss if self._first is None else self._first
        self._later = [*self._later[1 - MAX_LOSSES :], loss]
        if loss < self._lowest:
            self._lowest, self._at, self._later = loss, rows.step, []
        learned = self._first - self._lowest
        rise = max(self.spec.above * (self._lowest if self._lowest >= 0 else learned), 0.1 * learned)
        bound = self._lowest + rise
        self._times = self._times + 1 if loss > bound else 0
        if self._times >= self.spec.for_ and self._rises(np.array(self._later)):
            self._times = -(10**9)  # until the loss is near its minimum again
            text = f"evaluation loss {loss:.4g}, lowest {self._lowest:.4g} after {self._at} steps"
            yield Firing(text, loss, bound)

    def _rises(self, later: FloatArray) -> bool:
        """Return whether the losses after the minimum rise, and do not only vary."""
        falls = -np.diff(later).clip(max=0.0).sum()
        if later[-self.spec.for_ :].min() - self._lowest > FALLS * falls:
            return True
        return len(later) >= FEWEST and _trend(later) > TREND

    def bounds(self) -> Bounds | None:
        return Bounds("loss")


def _trend(values: FloatArray) -> float:
    """Return the statistic of Mann's test, in standard deviations: positive if values rise; float64 [at least 2]."""
    count, index = len(values), np.arange(len(values))
    score = np.tril(np.sign(np.subtract.outer(values, values))).sum()
    left = values - np.polyval(np.polyfit(index, values, 1), index)
    correlation = np.clip(left[1:] @ left[:-1] / max(left @ left, sys.float_info.min), 0.0, 0.99)
    variance = count * (count - 1) * (2 * count + 5) / 18 * (1 + correlation) / (1 - correlation)
    return float(score / math.sqrt(variance))
