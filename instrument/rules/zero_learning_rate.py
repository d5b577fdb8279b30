"""Rule: the learning rate is zero, or has fallen to nearly zero long before the end."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from ..config.rules import PersistentRule
from ..fields.field_types import Count
from .rule import Bounds, CatalogueRule, Firing
from .step_rows import StepRows

FEWEST = 100  # steps of a training whose rate is compared with its largest one
GROWTH = 2.0  # a smaller growth of the rate, as in most steps of a warm-up, need not be read


class ZeroLearningRateRule(PersistentRule):
    """The learning rate of all groups is 0, or that of the first other group has been nearly 0 in most steps since the first one.

    A linear warm-up starts with 0 for one step, hence several steps in succession. The default of `for` is that of
    `unchanged_parameter`.

    A schedule that counts epochs, but makes a step per batch, falls to its end in a few batches. A usual update is 1e-3 of a weight
    (CS231n), so that one at 1e-3 of the rate is 1e-6, and changes nothing in the rest of most trainings. Published schedules spend less
    than half of their steps there: step schedules a quarter at most, and a cosine one 2% (Loshchilov and Hutter 2017,
    https://arxiv.org/abs/1608.03983).
    """

    for_: Count = Field(3, alias="for", description="How often in succession the rate is 0.")
    fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        1e-3,
        description="Also if the rate was at most this fraction of an earlier one in more than half of at least 100 steps.",
    )


class ZeroLearningRate(CatalogueRule[ZeroLearningRateRule], name="zero_learning_rate"):
    saved = ("times", "low", "largest", "first")
    what = "zero learning rate"
    stage = "setup"
    evidence = "lr"
    advice = "Check the learning rate of the optimizer and the schedule; a schedule may count epochs instead of steps."
    requires = "the learning rate: pass optimizer= to attach, or lr= to end_step"

    def __init__(self, spec: ZeroLearningRateRule) -> None:
        super().__init__(spec)
        self._times = 0  # steps in succession with a rate of 0
        self._low = 0  # steps with a low rate since the largest one; -1 after this was reported
        self._largest = 0.0  # a rate of which no other one is more than `GROWTH` times as large
        self._first: int | None = None  # the first step with a rate

    def update(self, rows: StepRows) -> Iterator[Firing]:
        rate = rows.metric("lr")
        if not rows.is_training or rate is None:
            return
        self._first = rows.step if self._first is None else self._first
        self._times = self._times + 1 if rate == 0 else 0
        if self._times == self.spec.for_:
            yield Firing(f"in {self._times} steps in succession", rate)
        if rate > GROWTH * self._largest:
            self._largest, self._low = rate, min(self._low, 0)
        bound, steps = self.spec.fraction * self._largest, rows.step - self._first + 1
        self._low += self._low >= 0 and rate <= bound
        if 0 < rate <= bound and steps >= FEWEST and 2 * self._low > steps:
            self._low = -1
            text = f"{rate:.2g}, after {self._largest:.2g}: it was low in more than half of {steps} steps"
            yield Firing(text, rate, bound, what="learning rate nearly zero")

    def bounds(self) -> Bounds | None:
        if self._times or not self._largest:
            return None
        low = self.spec.fraction * self._largest if self._low >= 0 else 0.0
        return Bounds("lr", math.nextafter(low, 1.0), GROWTH * self._largest)
