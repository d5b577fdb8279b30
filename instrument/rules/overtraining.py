"""Rule: the training continues after the evaluation loss stopped improving."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ..spec.rules import OvertrainingRule
from .rule import Bounds, CatalogueRule, Firing
from .step_rows import StepRows


class Overtraining(CatalogueRule[OvertrainingRule]):
    """See `OvertrainingRule`: 1% worse than its minimum in 10 evaluations in succession (SageMaker Debugger)."""

    what = "overtraining"
    advice = "Stop earlier: use the checkpoint of the lowest evaluation loss."
    requires = "evaluations: set train.eval_every"

    def __init__(self, spec: OvertrainingRule) -> None:
        super().__init__(spec)
        self._lowest, self._at = math.inf, 0
        self._first: float | None = None
        self._times = 0

    def update(self, rows: StepRows) -> Iterator[Firing]:
        loss = rows.metric("loss")
        if rows.phase != "eval" or loss is None or not math.isfinite(loss):
            return
        self._first = loss if self._first is None else self._first
        if loss < self._lowest:
            self._lowest, self._at = loss, rows.step
        scale = self._lowest if self._lowest >= 0 else self._first - self._lowest
        bound = self._lowest + self.spec.above * scale
        self._times = self._times + 1 if loss > bound else 0
        if self._times == self.spec.for_:
            text = f"evaluation loss {loss:.4g}, lowest {self._lowest:.4g} after {self._at} steps"
            yield Firing(text, loss, bound)

    def bounds(self) -> Bounds | None:
        return Bounds("loss")

    def state_dict(self) -> dict[str, Any]:
        return {"lowest": self._lowest, "at": self._at, "first": self._first, "times": self._times}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._lowest, self._at, self._times = state["lowest"], state["at"], state["times"]
        self._first = state["first"]
