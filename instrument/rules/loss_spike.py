"""Rule: the training loss jumps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..spec.rules import LossSpikeRule
from .growth import Windows
from .rule import CatalogueRule, Firing
from .step_rows import StepRows

_SLOT = np.zeros(1, np.int64)


class LossSpike(CatalogueRule[LossSpikeRule]):
    """See `LossSpikeRule`: 5 times the median of the last 50 losses, and half of the first loss or more."""

    what = "loss spike"
    advice = "Look at the batch of this step, lower the learning rate, or clip gradients."
    requires = "the loss, which the loop passes to end_step"

    def __init__(self, spec: LossSpikeRule) -> None:
        super().__init__(spec)
        self._windows = Windows(spec)
        self._windows.grow(1)
        self._first: float | None = None
        self._holds = False

    def update(self, rows: StepRows) -> Iterator[Firing]:
        loss = rows.metric("loss")
        if not rows.is_training or loss is None or not math.isfinite(loss):
            return
        self._first = loss if self._first is None else self._first
        values = np.array([loss])
        median = self._windows.medians(_SLOT, values).get(0)
        self._windows.add(_SLOT, values)
        held, self._holds = self._holds, median is not None and loss > 0.5 * self._first
        if self._holds and not held and median is not None:
            yield Firing(
                f"{loss:.4g}, {loss / median:.0f} times its median {median:.4g}", loss, self.spec.factor * median
            )

    def state_dict(self) -> dict[str, Any]:
        return {"windows": self._windows.state_dict(), "first": self._first, "holds": self._holds}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._windows.load_state_dict(state["windows"])
        self._first, self._holds = state["first"], state["holds"]
