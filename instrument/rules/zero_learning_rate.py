"""Rule: the learning rate is zero."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from ..config.rules import RULES, PersistentRule
from ..fields.field_types import Count
from .rule import Bounds, CatalogueRule, Firing
from .step_rows import StepRows


class ZeroLearningRateRule(PersistentRule):
    """The learning rate is exactly 0: no parameter of the first group changes.

    A linear warm-up starts with 0 for one step, hence several steps in succession. The default of `for` is that of
    `unchanged_parameter`.
    """

    rule: Literal["zero_learning_rate"]
    for_: Count = Field(3, alias="for", description="How often in succession the condition has to hold.")


@RULES.register("zero_learning_rate")
class ZeroLearningRate(CatalogueRule[ZeroLearningRateRule]):
    fields = ZeroLearningRateRule
    saved = ("times",)
    what = "zero learning rate"
    stage = "setup"
    evidence = "lr"
    advice = "Check the learning rate of the optimizer and the schedule; a schedule may count epochs instead of steps."
    requires = "the learning rate: pass optimizer= to attach, or lr= to end_step"

    def __init__(self, spec: ZeroLearningRateRule) -> None:
        super().__init__(spec)
        self._times = 0

    def update(self, rows: StepRows) -> Iterator[Firing]:
        rate = rows.metric("lr")
        if not rows.is_training or rate is None:
            return
        self._times = self._times + 1 if rate == 0 else 0
        if self._times == self.spec.for_:
            yield Firing(f"in {self._times} steps in succession", rate)

    def bounds(self) -> Bounds | None:
        return None if self._times else Bounds("lr", low=math.nextafter(0.0, 1.0))
