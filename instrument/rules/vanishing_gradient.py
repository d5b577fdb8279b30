"""Rule: the gradient of a weight vanishes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from pydantic import Field

from ..config.rules import PersistentRule
from ..fields.field_types import Count, NonNegative
from .rule import Bounds, BoundsFromZeroRule, Firing
from .step_rows import BoolArray, Chosen, Location, StepRows


class VanishingGradientRule(PersistentRule):
    """The `rms` of the gradient of a weight is tiny, although the loss has not halved since the first step.

    The threshold is that of SageMaker Debugger (VanishingGradient) for a loss of 1. A gradient is proportional to the scale of the loss,
    hence the comparison with the first loss. Without a loss, or after a rollout, it is compared with the largest gradient of the step: the
    loss may include that of a critic. A training that has converged has small gradients too, hence the condition on the loss. Frozen layers
    do not count. A first step at a learning rate of 0 does not count, and neither do small gradients after a first one of exactly 0: the
    weights behind it, such as `lora_B`, start at zero and have not grown yet.
    """

    below: NonNegative = Field(
        1e-7, gt=0, description="The rms is below this many times the absolute value of the first loss."
    )
    for_: Count = Field(3, alias="for", description="How often in succession the condition has to hold.")


class VanishingGradient(BoundsFromZeroRule[VanishingGradientRule], name="vanishing_gradient"):
    saved = (*BoundsFromZeroRule.saved, "first_loss", "follows_rollout")
    what = "vanishing gradient"
    notes_unused = True
    stage = "gradients"
    advice = "Use another initialization or activation function, or add normalization or skip connections."
    requires = "the gradients of parameters with the statistic rms, such as hooks=gradients"
    statistics = ("rms",)
    further_statistics = ("zero_fraction",)

    def __init__(self, spec: VanishingGradientRule) -> None:
        super().__init__(spec)
        self._first_loss: float | None = None
        self._follows_rollout = False

    def update(self, rows: StepRows) -> Iterable[Firing]:
        self._follows_rollout |= rows.phase == "rollout"
        return super().update(rows)

    def selects(self, location: Location) -> bool:
        return location.role == "param_grad" and not location.is_of_bias

    def holds(self, rows: StepRows, chosen: Chosen) -> BoolArray:
        loss = rows.metric("loss")
        if self._first_loss is None and not self._follows_rollout and loss is not None and math.isfinite(loss):
            self._set_first_loss(loss)
        has_learned = loss is not None and self._first_loss is not None and loss < 0.5 * self._first_loss
        has_no_rate = rows.step == 0 and rows.metric("lr") == 0  # later, it may be that of another group of parameters
        if has_learned or has_no_rate:
            return np.zeros(len(chosen.locations), np.bool_)
        if self._first_loss is None:
            values = self.values(rows, chosen)
            self.below = self.spec.below * float(np.fmax.reduce(values, initial=0.0))
        return super().holds(rows, chosen)

    def _set_first_loss(self, loss: float) -> None:
        self._first_loss, self.below = loss, self.spec.below * abs(loss)

    def bounds(self) -> Bounds | None:
        return None if self._first_loss is None else super().bounds()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self._first_loss is not None:
            self._set_first_loss(self._first_loss)
