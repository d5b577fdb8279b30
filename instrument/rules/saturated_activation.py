"""Rule: many outputs of an activation function are saturated."""

from __future__ import annotations

import numpy as np

from ..config.rules import FractionRule
from .dead_units import UnitsRule
from .rule import WEIGHTED
from .step_rows import BoolArray, Chosen, RowLayout, StepRows


class SaturatedActivation(UnitsRule[FractionRule], name="saturated_activation"):
    """The `saturated_fraction` of an output is large: Tanh, Sigmoid and similar functions pass no gradient there.

    The threshold is that of SageMaker Debugger (SaturatedActivation, `threshold_layer`). The output of the network does not count:
    confident predictions saturate it. Neither does a layer that becomes saturated after the loss has halved: gates open and close in a
    network that has learned.
    """

    what = "saturated activation"
    advice = "Use smaller initial weights or a smaller learning rate, or add normalization in front of this layer."
    requires = "an output (kind: forward) with the statistic saturated_fraction, such as hooks=dead_relu"
    statistics = ("saturated_fraction",)

    def holds(self, rows: StepRows, chosen: Chosen) -> BoolArray:
        holds = super().holds(rows, chosen) & ((self._counts[chosen.slots] > 0) | (not self.has_learned(rows)))
        return holds & ~self._is_last(rows.layout, chosen) if holds.any() else holds

    @staticmethod
    def _is_last(layout: RowLayout, chosen: Chosen) -> BoolArray:
        """Return which locations are outputs of the network: no layer with weights follows.

        Confident predictions saturate there in a healthy training. If the step has no rows of such layers, none is known to be last.
        """
        rows = enumerate(layout.locations)
        weighted = [row for row, location in rows if location.kind == "forward" and location.module_type in WEIGHTED]
        last = np.zeros(len(chosen.locations), np.int64)
        np.maximum.at(last, np.arange(len(last)) if chosen.index is None else chosen.index, chosen.rows)
        is_last: BoolArray = last > max(weighted, default=len(layout))
        return is_last

    def describe(self, value: float) -> str:
        return f"{value:.1%} of its output is saturated"
