"""Rule: the model overfits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ..spec.rules import OverfitRule
from .rule import Bounds, CatalogueRule, Firing, QuietSteps
from .step_rows import StepRows

RISE = 0.1  # how far the evaluation loss has to be above its minimum, relative to the minimum and to what was learned before


class Overfit(CatalogueRule[OverfitRule]):
    """See `OverfitRule`: twice the training loss in 3 evaluations in succession (SageMaker Debugger: 1.1 times)."""

    what = "overfitting"
    advice = "Stop earlier, use more data or augmentation, or increase the weight decay."
    requires = "evaluations: set train.eval_every"

    def __init__(self, spec: OverfitRule) -> None:
        super().__init__(spec)
        self._sum, self._count = 0.0, 0  # of the training losses since the last evaluation
        self._lowest = math.inf
        self._first: float | None = None  # the first training loss
        self._times = 0

    def update(self, rows: StepRows) -> Iterator[Firing]:
        loss = rows.metric("loss")
        if loss is None or not math.isfinite(loss):
            return
        if rows.is_training:
            self._add([loss])
        elif rows.phase == "eval" and self._count:
            training = self._sum / self._count
            self._sum, self._count = 0.0, 0
            self._lowest = min(self._lowest, loss)
            ratio = (loss - training) / training if training > 0 and self._lowest >= 0 else 0.0
            learned = max(abs(self._lowest), (self._first or 0.0) - self._lowest)
            has_risen = loss - self._lowest > RISE * learned
            self._times = self._times + 1 if ratio > self.spec.above and has_risen else 0
            if self._times == self.spec.for_:
                text = f"evaluation loss {loss:.4g}, training loss {training:.4g}, lowest evaluation loss {self._lowest:.4g}"
                yield Firing(text, ratio, self.spec.above)

    def _add(self, losses: Sequence[float]) -> None:
        """Add training losses."""
        for loss in losses:
            self._sum += loss
        self._count += len(losses)
        self._first = losses[0] if losses and self._first is None else self._first

    def bounds(self) -> Bounds | None:
        return Bounds("loss")

    def remember(self, steps: QuietSteps) -> None:
        self._add(steps.losses)

    def state_dict(self) -> dict[str, Any]:
        return {
            "sum": self._sum,
            "count": self._count,
            "lowest": self._lowest,
            "first": self._first,
            "times": self._times,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._sum, self._count, self._lowest = state["sum"], state["count"], state["lowest"]
        self._first, self._times = state["first"], state["times"]
