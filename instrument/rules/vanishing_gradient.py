"""Rule: the gradient of a weight vanishes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ..spec.rules import VanishingGradientRule
from .rule import Bounds, BoundsRule
from .step_rows import BoolArray, Chosen, Location, StepRows


class VanishingGradient(BoundsRule[VanishingGradientRule]):
    """See `VanishingGradientRule`: rms below 1e-7 (SageMaker Debugger) times the first loss, while the loss has not halved."""

    what = "vanishing gradient"
    advice = "Use another initialization or activation function, or add normalization or skip connections."
    requires = "the gradients of parameters with the statistic rms, such as hooks=gradients"
    statistics = ("rms",)

    def __init__(self, spec: VanishingGradientRule) -> None:
        super().__init__(spec)
        self._first_loss: float | None = None

    def selects(self, location: Location) -> bool:
        return location.role == "param_grad" and not location.is_of_bias

    def holds(self, rows: StepRows, chosen: Chosen) -> BoolArray:
        loss = rows.metric("loss")
        if self._first_loss is None and loss is not None and math.isfinite(loss):
            self._set_first_loss(loss)
        has_learned = loss is not None and self._first_loss is not None and loss < 0.5 * self._first_loss
        if has_learned:
            return np.zeros(len(chosen.locations), np.bool_)
        if self._first_loss is None:
            values = self.values(rows, chosen)
            self.below = self.spec.below * float(np.fmax.reduce(values, initial=0.0))
        return super().holds(rows, chosen)

    def _set_first_loss(self, loss: float) -> None:
        self._first_loss, self.below = loss, self.spec.below * abs(loss)

    def bounds(self) -> Bounds | None:
        return None if self._first_loss is None else super().bounds()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "first_loss": self._first_loss}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if state["first_loss"] is not None:
            self._set_first_loss(state["first_loss"])
