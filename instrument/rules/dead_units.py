"""Rule: many units of a layer are dead."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Annotated, TypeVar

import numpy as np
from pydantic import Field

from ..config.rules import FractionRule
from .rule import BoundsRule, Firing, QuietSteps
from .step_rows import BoolArray, Chosen, Location, StepRows

FractionT = TypeVar("FractionT", bound=FractionRule)


class DeadUnitsRule(FractionRule):
    """The `dead_fraction` of an output is large, its units are zero for a whole batch, although the loss has not halved since the start.

    The threshold, and the condition on what was learned, are those of AutoTrainer (Zhang et al., ICSE 2021, `gamma`). SageMaker Debugger
    has 0.5 (DeadRelu, `threshold_layer`), which healthy layers exceed if they are wider than their data have dimensions. A layer
    whose units are all zero counts in any case: the loss may have halved before, or because of the layers after it.
    """

    above: Annotated[float, Field(ge=0, lt=1)] = Field(0.7, description=FractionRule.model_fields["above"].description)


class UnitsRule(BoundsRule[FractionT]):
    """The fraction of an output that passes no gradient."""

    saved = (*BoundsRule.saved, "first_loss")
    stage = "units"
    merge = np.fmin
    _first_loss: float | None = None

    def selects(self, location: Location) -> bool:
        return location.is_output

    def update(self, rows: StepRows) -> Iterable[Firing]:
        loss = rows.metric("loss") if rows.is_training else None
        if self._first_loss is None and loss is not None and math.isfinite(loss):
            self._first_loss = loss
        return super().update(rows)

    def has_learned(self, rows: StepRows) -> bool:
        """Return whether the loss has halved."""
        loss = rows.metric("loss")
        return loss is not None and 0 <= loss < 0.5 * (self._first_loss or 0.0)

    def remember(self, steps: QuietSteps) -> None:
        self._first_loss = next(iter(steps.losses), None) if self._first_loss is None else self._first_loss


class DeadUnits(UnitsRule[DeadUnitsRule], name="dead_units"):
    what = "dead units"
    advice = "Lower the learning rate, or replace the ReLU by a LeakyReLU or GELU."
    requires = "an output (kind: forward) with the statistic dead_fraction, such as hooks=dead_relu"
    statistics = ("dead_fraction",)

    def describe(self, value: float) -> str:
        return f"{value:.1%} of its units are zero for a whole batch"

    def holds(self, rows: StepRows, chosen: Chosen) -> BoolArray:
        return super().holds(rows, chosen) & (not self.has_learned(rows) or self.values(rows, chosen) == 1)
