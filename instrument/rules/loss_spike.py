"""Rule: the training loss jumps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..spec.rules import LossSpikeRule
from .rule import CatalogueRule, Firing
from .step_rows import Bounds, QuietSteps, StepRows

SUDDEN = 1000.0  # how many times the first loss, before the median of enough losses exists
SLACK = 4.0  # how many times smaller than the smallest loss of the window the next losses may be


class LossSpike(CatalogueRule[LossSpikeRule]):
    """See `LossSpikeRule`: 5 times the median of the last 50 losses, and half of the first loss or more."""

    what = "loss spike"
    advice = "Look at the batch of this step, lower the learning rate, or clip gradients."
    requires = "the loss, which the loop passes to end_step"

    def __init__(self, spec: LossSpikeRule) -> None:
        super().__init__(spec)
        self._losses: deque[float] = deque(maxlen=spec.window)  # the last ones
        self._first: float | None = None
        self._holds = False

    def update(self, rows: StepRows) -> Iterator[Firing]:
        loss = rows.metric("loss")
        if not rows.is_training or loss is None or not math.isfinite(loss):
            return
        self._first = loss if self._first is None else self._first
        exceeded = self._exceeded(loss, self._first) if loss > 0.5 * self._first else None
        self._losses.append(loss)
        held, self._holds = self._holds, exceeded is not None
        if exceeded is not None and not held:
            yield exceeded

    def _exceeded(self, loss: float, first: float) -> Firing | None:
        """Return what to report if a loss is far above the previous ones."""
        if len(self._losses) < self.spec.after:
            bound = max(SUDDEN, self.spec.factor) * max(
                first, 1.0
            )  # a first loss near zero is no measure of the others
            return Firing(f"{loss:.4g}, {first:.4g} at first", loss, bound) if loss > bound else None
        if 0 < loss <= self.spec.factor * min(self._losses):
            return None
        median = float(np.median(self._losses))
        if median <= 0 or loss <= self.spec.factor * median:
            return None
        return Firing(f"{loss:.4g}, {loss / median:.0f} times its median {median:.4g}", loss, self.spec.factor * median)

    def quiet_bounds(self, rows: StepRows) -> Bounds | None:  # noqa: ARG002
        if self._first is None or self._holds:
            return None
        low = min(self._losses) / SLACK
        if low <= 0:
            return Bounds("loss", -math.inf, 0.5 * self._first)
        return Bounds("loss", low, max(0.5 * self._first, self.spec.factor * low))

    def advance(self, steps: QuietSteps) -> None:
        self._losses.extend(steps.losses)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": [*self._losses], "first": self._first, "holds": self._holds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._losses = deque(state["losses"], self.spec.window)
        self._first, self._holds = state["first"], state["holds"]
