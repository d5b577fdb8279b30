"""Rule: the training continues after the evaluation loss stopped improving."""

from __future__ import annotations

import math
from collections.abc import Iterator

from pydantic import Field

from ..config.rules import PersistentRule
from ..fields.field_types import Count, NonNegative
from .rule import Bounds, CatalogueRule, Firing
from .step_rows import StepRows


class OvertrainingRule(PersistentRule):
    """The evaluation loss is worse than its minimum in many evaluations in succession.

    Both numbers are those of SageMaker Debugger (Overtraining, `patience_validation` and `delta`). In a training that has converged, the
    lowest loss is an extreme value, so that the lowest of the last `for` losses also has to be above it by more than 1.5 times the sum
    of all decreases in between: five of 1,000 series of noise reach this. The loss also has to rise by a tenth of the decrease from the
    first evaluation to the minimum. If a loss was negative, the fraction is that of this decrease, instead of the minimum.
    """

    above: NonNegative = Field(0.01, description="The loss is above its minimum by more than this fraction.")
    for_: Count = Field(10, alias="for", description="In how many evaluations in succession.")


class Overtraining(CatalogueRule[OvertrainingRule], name="overtraining"):
    source = "evaluations"
    saved = ("lowest", "at", "first", "last", "falls", "times", "recent")
    what = "overtraining"
    stage = "learning"
    advice = "Stop earlier: use the checkpoint of the lowest evaluation loss."
    requires = "evaluations: set train.eval_every"

    def __init__(self, spec: OvertrainingRule) -> None:
        super().__init__(spec)
        self._lowest, self._at = math.inf, 0
        self._first: float | None = None
        self._last = self._falls = 0.0  # the last loss, and the sum of its decreases since the minimum
        self._times = 0
        self._recent: list[float] = []  # the last losses

    def update(self, rows: StepRows) -> Iterator[Firing]:
        loss = rows.metric("loss")
        if rows.phase != "eval" or loss is None or not math.isfinite(loss):
            return
        self._first = loss if self._first is None else self._first
        self._falls, self._last = self._falls + max(0.0, self._last - loss), loss
        self._recent = [*self._recent, loss][-self.spec.for_ :]
        if loss < self._lowest:
            self._lowest, self._at, self._falls = loss, rows.step, 0.0
        learned = self._first - self._lowest
        rise = max(self.spec.above * (self._lowest if self._lowest >= 0 else learned), 0.1 * learned)
        bound = self._lowest + rise
        self._times = self._times + 1 if loss > bound else 0
        if self._times >= self.spec.for_ and min(self._recent) - self._lowest > 1.5 * self._falls:
            self._times = -(10**9)  # until the loss is near its minimum again
            text = f"evaluation loss {loss:.4g}, lowest {self._lowest:.4g} after {self._at} steps"
            yield Firing(text, loss, bound)

    def bounds(self) -> Bounds | None:
        return Bounds("loss")
