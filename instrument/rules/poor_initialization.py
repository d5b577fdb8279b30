"""Rule: the initialization lets the outputs shrink or grow from layer to layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from ..spec.rules import PoorInitializationRule
from .rule import WEIGHTED, Firing, LocatedRule
from .step_rows import Chosen, Location, StepRows


class PoorInitialization(LocatedRule[PoorInitializationRule]):
    """See `PoorInitializationRule`: std of the outputs of layers with weights, at step 0 only (He et al. 2015)."""

    what = "poor initialization"
    advice = "Initialize with apply: {action: init, fn: kaiming_normal_}, or add normalization layers."
    requires = "the outputs (kind: forward) of layers with weights with the statistic std, such as hooks=activations"
    statistics = ("std",)

    def __init__(self, spec: PoorInitializationRule) -> None:
        super().__init__(spec)
        self._done = False

    def selects(self, location: Location) -> bool:
        return location.is_output and location.module_type in WEIGHTED and location.phase == "train"

    def check(self, rows: StepRows, chosen: Chosen) -> Iterator[Firing]:
        if self._done:
            return
        self._done = True
        values = chosen.values(rows.column("std"), self.merge)
        if rows.step or not (values > 0).any():  # a later step is no initialization
            return
        positive = np.where(values > 0, values, np.nan)
        low, high = int(np.nanargmin(positive)), int(np.nanargmax(positive))
        ratio = float(values[high] / values[low])
        if ratio > self.spec.factor:
            at, other = (low, high) if low > high else (high, low)  # the later layer is where it arrives
            text = (
                f"std {values[at]:.2g}, but {values[other]:.2g} in {chosen.locations[other].layer or '.'}: "
                f"a ratio above {self.spec.factor:g}"
            )
            yield Firing(text, ratio, self.spec.factor, chosen.locations[at])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "done": self._done}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._done = state["done"]
