"""Rule: the training loss jumps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..spec.rules import LossSpikeRule
from .rule import CatalogueRule, Firing
from .step_rows import StepRows


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
        median = self._exceeded_median(loss) if loss > 0.5 * self._first else None
        self._losses.append(loss)
        held, self._holds = self._holds, median is not None
        if median is not None and not held:
            yield Firing(
                f"{loss:.4g}, {loss / median:.0f} times its median {median:.4g}", loss, self.spec.factor * median
            )

    def _exceeded_median(self, loss: float) -> float | None:
        """Return the median of the previous losses if a loss exceeds it `factor` times."""
        if len(self._losses) < self.spec.after or 0 < loss <= self.spec.factor * min(self._losses):
            return None
        median = float(np.median(self._losses))
        return median if median > 0 and loss > self.spec.factor * median else None

    def state_dict(self) -> dict[str, Any]:
        return {"losses": [*self._losses], "first": self._first, "holds": self._holds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._losses = deque(state["losses"], self.spec.window)
        self._first, self._holds = state["first"], state["holds"]
