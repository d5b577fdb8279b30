"""Rule: a tensor is zero."""

from __future__ import annotations

import numpy as np
from pydantic import Field

from ..config.rules import PersistentRule
from ..fields.field_types import Count
from .rule import Bounds, Firing, PersistentLocatedRule
from .step_rows import BoolArray, Chosen, Location, StepRows


class AllZeroRule(PersistentRule):
    """All elements of an output or of a gradient are zero (SageMaker Debugger: AllZero, 100%).

    Gradients of biases do not count: they cancel out exactly in some healthy trainings, such as that of a Wasserstein critic. Neither do
    gradients of frozen layers, the further items of an output, such as masks and position biases, which can be zero by design, and outputs
    of one number: a module of losses returns metrics, such as the fraction of clipped samples. A first step at a learning rate of 0 does
    not count: weights that start at zero are still zero after it.
    """

    for_: Count = Field(3, alias="for", description="How often in succession the condition has to hold.")


class AllZero(PersistentLocatedRule[AllZeroRule], name="all_zero"):
    what = "all zero"
    notes_unused = True
    stage = "units"
    advice = "Check that the layers before it, and for a gradient those after it, are connected and not dead."
    requires = "an output or a gradient with the statistic zero_fraction, such as hooks=activations"
    statistics = ("zero_fraction",)
    merge = np.fmin

    def selects(self, location: Location) -> bool:
        is_read = location.is_first_output or (location.is_gradient and not location.is_of_bias)
        return location.phase == "train" and is_read

    def holds(self, rows: StepRows, chosen: Chosen) -> BoolArray:
        if rows.step == 0 and rows.metric("lr") == 0:  # later, it may be that of another group of parameters
            return np.zeros(len(chosen.locations), np.bool_)
        zero: BoolArray = chosen.values(rows.column("zero_fraction"), self.merge) >= 1
        is_gradient = np.array([location.is_gradient for location in chosen.locations], np.bool_)
        zero &= is_gradient | (chosen.values(rows.counts("numel"), self.merge) != 1)
        if rows.metric("loss") == 0:  # nothing to learn, such as with a margin that all samples keep
            zero &= ~is_gradient
        return zero

    def bounds(self) -> Bounds | None:
        return None if self._any else Bounds("zero_fraction", high=np.nextafter(1.0, 0.0))

    def firing(self, rows: StepRows, chosen: Chosen, at: int) -> Firing:  # noqa: ARG002
        return Firing(f"every element is zero, {self.spec.for_} times in succession", 1.0, 1.0, chosen.locations[at])
