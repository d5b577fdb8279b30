"""Rule: a tensor is zero."""

from __future__ import annotations

import numpy as np

from ..spec.rules import AllZeroRule
from .rule import Bounds, Firing, PersistentLocatedRule
from .step_rows import BoolArray, Chosen, Location, StepRows


class AllZero(PersistentLocatedRule[AllZeroRule]):
    """See `AllZeroRule`: 100% of the elements (SageMaker Debugger)."""

    what = "all zero"
    advice = "Check that the layers before it, and for a gradient those after it, are connected and not dead."
    requires = "an output or a gradient with the statistic zero_fraction, such as hooks=activations"
    statistics = ("zero_fraction",)
    merge = np.fmin

    def selects(self, location: Location) -> bool:
        return location.phase == "train" and (location.is_output or (location.is_gradient and not location.is_of_bias))

    def holds(self, rows: StepRows, chosen: Chosen) -> BoolArray:
        zero: BoolArray = chosen.values(rows.column("zero_fraction"), self.merge) >= 1
        if rows.metric("loss") == 0:  # nothing to learn, such as with a margin that all samples keep
            zero &= np.array([not location.is_gradient for location in chosen.locations])
        return zero

    def bounds(self) -> Bounds | None:
        return None if self._any else Bounds("zero_fraction", high=np.nextafter(1.0, 0.0))

    def firing(self, rows: StepRows, chosen: Chosen, at: int) -> Firing:  # noqa: ARG002
        return Firing(f"every element is zero, {self.spec.for_} times in succession", 1.0, 1.0, chosen.locations[at])
