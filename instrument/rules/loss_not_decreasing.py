"""Rule: the training loss does not decrease."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Annotated

from pydantic import Field

from ..config.rules import RuleBase
from .rule import RELATIONS, Bounds, CatalogueRule, Firing, QuietSteps
from .step_rows import StepRows

PLATEAU = 0.05  # the largest relative difference between quarters of a loss that stays the same
QUARTERS = 4
RISE = 2.0  # how many times the first loss the last one before a loss that is not finite has to be
DIVERGED = 20  # losses in succession


class LossNotDecreasingRule(RuleBase):
    """The mean loss of the later half of the first steps is not lower than that of the earlier half.

    SageMaker Debugger (LossNotDecreasing) expects 0.1% in 10 steps; here it is 1% in 200 steps, since batches differ, and small learning
    rates need some time to leave the plateau at the beginning. A loss that doubles and then is not finite ends the window. A loss that
    becomes negative, such as that of a Wasserstein critic, is not a measure of an error and does not count. Losses after a
    rollout, whose data follow the policy, do not count, nor do those of targets that move, as in Q-learning: their mean squared distance
    from their first mean quadruples. Losses of several optimizers with constant targets that differ, as those of a GAN, do not count
    either. Nor does a loss that rises and falls, such as that of a generator: the means of the quarters of the
    window have to be equal within 5%, or never fall from one quarter to the next.

    It also fires if the loss decreases to that of a constant prediction, and stays there: the last quarter is not lower than the
    one before, nor lower than the entropy of the classes, or the variance of the targets. Targets that do not belong to their
    inputs allow no lower loss (Karpathy 2019, https://karpathy.github.io/2019/04/25/recipe/, "input-independent baseline").

    It fires before the end of the window if 20 losses in succession are above twice the first loss, and above twice the entropy of the
    classes: the network has become much worse than a constant prediction, for example since the learning rate is too high.
    """

    window: Annotated[int, Field(ge=4, le=1_000_000)] = Field(200, description="The number of steps that are compared.")
    by: Annotated[float, Field(ge=0, lt=1)] = Field(0.01, description="The relative decrease that is expected.")


class LossNotDecreasing(CatalogueRule[LossNotDecreasingRule], name="loss_not_decreasing"):
    saved = ("sums", "count", "first", "last", "constant", "limit", "exceeded")
    relation = "constant_prediction"
    what = "loss not decreasing"
    stage = "learning"
    evidence = "loss"
    advice = (
        "Check the labels, the loss function and the learning rate; see the guide Debug a network that does not learn."
    )
    requires = "the loss, which the loop passes to end_step"

    def __init__(self, spec: LossNotDecreasingRule) -> None:
        super().__init__(spec)
        self._sums = [0.0] * QUARTERS  # of the losses in each quarter of the window
        self._count = 0
        self._first = self._last = math.nan
        self._constant: float | None = None  # the loss of a constant prediction
        self._limit = math.inf  # of losses that a training of a classifier does not keep
        self._exceeded = 0  # losses in succession above the limit

    def update(self, rows: StepRows) -> Iterator[Firing]:
        loss = rows.metric("loss")
        moves = any(row.relation == self.relation and row.holds is None and row.value for row in rows.relations)
        if moves or rows.phase == "rollout":
            self._count = self.spec.window
        if not rows.is_training or loss is None or self._count >= self.spec.window:
            return
        if not math.isfinite(loss):
            self._count = self.spec.window
            bound = RISE * abs(self._first)
            if self._last > bound:
                yield Firing(f"{self._first:.4g} at first, {self._last:.4g} before it was {loss}", self._last, bound)
            return
        self._add(loss)
        for row in rows.relations:
            if row.relation == self.relation and row.holds and row.value is not None:
                self._constant = row.value * loss  # also for a loss that was scaled
                if not row.path:  # the targets are classes; a loss of numbers grows with its targets
                    self._limit = RISE * max(self._constant, self._first)
        if self._exceeded == DIVERGED:
            self._count = self.spec.window
            text = (
                f"{loss:.4g}, {self._first:.4g} at first, {self._constant:.4g} for a constant prediction; {DIVERGED} losses "
                "in succession are above twice both"
            )
            yield Firing(text, loss, self._limit, what="diverging loss")
            return
        if self._count < self.spec.window or loss < 0:
            return
        means = [total / count for total, count in zip(self._sums, self._counts(), strict=True)]
        half = sum(self._counts()[:2])
        earlier, later = sum(self._sums[:2]) / half, sum(self._sums[2:]) / (self.spec.window - half)
        bound = (1 - self.spec.by) * earlier
        is_plateau, always_rises = max(means) - min(means) <= PLATEAU * earlier, means == sorted(means)
        if later >= bound and (is_plateau or always_rises):
            text = f"mean {later:.4g} in the later half of {self.spec.window} steps, {earlier:.4g} in the earlier half"
            yield Firing(text, later, bound)
        elif self._constant is not None:
            low, high = (1 - self.spec.by) * self._constant, (1 + PLATEAU) * self._constant
            if low <= means[-1] <= high and means[-1] >= (1 - self.spec.by) * means[-2]:
                text = (
                    f"mean {means[-1]:.4g} in the last quarter of {self.spec.window} steps, as of a constant prediction"
                )
                yield Firing(text, means[-1], low)

    def _counts(self) -> list[int]:
        ends = [self.spec.window * quarter // QUARTERS for quarter in range(QUARTERS + 1)]
        return [end - begin for begin, end in itertools.pairwise(ends)]

    def _add(self, loss: float) -> None:
        """Add a loss. A negative one ends the window: a relative decrease of losses with both signs means nothing."""
        if loss < 0:
            self._count = self.spec.window
            return
        self._first, self._last = loss if math.isnan(self._first) else self._first, loss
        self._exceeded = self._exceeded + 1 if loss > self._limit else 0
        quarter = (QUARTERS * (self._count + 1) - 1) // self.spec.window
        self._sums[quarter] += loss
        self._count += 1

    def bounds(self) -> Bounds | list[Bounds] | None:
        left = self.spec.window - self._count
        if left <= 0:
            return Bounds("loss")
        # The last step of the window decides.
        return [Bounds("loss", high=self._limit, steps=left - 1), Bounds(RELATIONS, high=0)]

    def remember(self, steps: QuietSteps) -> None:
        for loss in steps.losses:
            if self._count >= self.spec.window:
                return
            self._add(loss)
