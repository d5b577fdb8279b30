"""Rule: the training loss jumps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from ..config.rules import WindowRule
from ..fields.field_types import Count
from .rule import Bounds, CatalogueRule, Firing, QuietSteps
from .step_rows import StepRows

SUDDEN = 1000.0  # how many times the largest previous loss, before the median of enough losses exists
# Losses up to this size are 8 roundings of float32 terms of order 1 that cancel, such as those of a new policy.
ROUNDING = 2.0**-20
FEWEST = 2  # previous losses: a first loss near zero, such as that of a policy equal to the old one, cannot be compared with others
LARGEST = 2.0  # how many times the largest of the last `after` losses
LATER = "losses above"  # in the text about several losses, of which the last one is that of the event
SLACK = 4.0  # how many times smaller than the smallest loss of the window the next losses may be


class LossSpikeRule(WindowRule):
    """The training loss is far above the median of the previous losses, and undoes half of what was learned.

    A single batch with a large loss undoes nothing, so `for` losses in succession have to be above the bound of the first one, as NaN is.
    The loss is also above twice the largest of the last `after` losses, since some losses vary a lot, such as those of episodes. Nothing
    was learned while the median is not below the first loss, as in the training of a policy, whose loss follows its returns. A ratio of
    losses with both signs has no meaning. If a loss was negative, `factor` therefore refers to the difference from the median and to the
    range of the window; so it does after a rollout, since the targets of a critic move. Before `after` losses exist, a loss above 1000
    times the largest previous one (of at least two, none of them negative), or above 1e6 times the first two, is reported at once. So is
    one that, like each of `for` - 1 losses before it, is more than `factor` times the previous loss. Losses up to 1e-6 are no reference
    there, and not if a loss was negative: they are the rounding of terms that cancel, as in a policy gradient with normalized advantages
    and equal probabilities.
    """

    factor: Annotated[float, Field(gt=1)] = Field(
        5.0,
        description="The loss exceeds this many times the median; if a loss was negative, it exceeds the median by this many times "
        "the range of the previous losses.",
    )
    after: Count = Field(20, description="How many previous losses have to exist.")
    for_: Count = Field(
        3, alias="for", description="How many losses in succession are above the bound of the first one."
    )


class LossSpike(CatalogueRule[LossSpikeRule], name="loss_spike"):
    saved = ("losses", "first", "lowest", "holds", "jump", "times")
    what = "loss spike"
    stage = "divergence"
    evidence = "loss"
    advice = "Look at the batch with which the loss jumps, lower the learning rate, or clip gradients."
    requires = "the loss, which the loop passes to end_step"

    def __init__(self, spec: LossSpikeRule) -> None:
        super().__init__(spec)
        self._losses: deque[float] = deque(maxlen=spec.window)  # the last ones
        self._first: float | None = None
        self._lowest = 0.0  # of all losses; losses that were never negative have a floor
        self._holds = False
        self._jump: list[Any] = []  # the text, the loss and the bound of a jump that is not decided
        self._times = 0  # how many losses are above this bound

    def update(self, rows: StepRows) -> Iterator[Firing]:
        loss = rows.metric("loss")
        if rows.phase == "rollout":
            self._lowest = min(self._lowest, -math.ulp(0.0))
        if not rows.is_training or loss is None:
            return
        held, is_sudden, exceeded = self._holds, len(self._losses) < self.spec.after, None
        if math.isfinite(loss):
            self._first = loss if self._first is None else self._first
            exceeded = self._exceeded(loss) if loss > 0.5 * (self._first + self._lowest) else None
            self._lowest = min(self._lowest, loss)
            self._losses.append(loss)
            self._holds = exceeded is not None
        if self._jump and not loss <= self._jump[2]:  # also NaN
            self._times += 1
        elif exceeded is not None and not held:
            self._jump, self._times = [exceeded.text, exceeded.value, exceeded.threshold], 1
        else:
            self._jump = []
        if self._jump and self._times >= (1 if is_sudden else self.spec.for_):
            (text, value, bound), self._jump = self._jump, []
            if self._times > 1:
                text = f"{self._times} {LATER} {bound:.4g}; the first one was {text}"
            yield Firing(text, value, bound)

    def _exceeded(self, loss: float) -> Firing | None:
        largest = max(map(abs, self._losses), default=0.0)
        if largest <= ROUNDING and (len(self._losses) < self.spec.after or self._lowest < 0):
            return None
        if len(self._losses) < self.spec.after:
            bound, start = max(SUDDEN, self.spec.factor) * largest, max([*self._losses][:FEWEST])
            if start > ROUNDING:  # a loss that grows in each step, but by less
                bound = min(bound, SUDDEN**2 * start)
                last = [*self._losses][-self.spec.for_ :]
                explodes = min(last) > ROUNDING and all(b > self.spec.factor * a for a, b in pairwise(last))
                if explodes and len(last) == self.spec.for_ > 1:
                    bound = min(bound, self.spec.factor * last[-1])
            if len(self._losses) < FEWEST or self._lowest < 0 or loss <= bound:
                return None
            return Firing(f"{loss:.4g}, {self._first:.4g} at first", loss, bound)
        if 0 < loss <= self.spec.factor * min(self._losses):
            return None
        median, low, high = float(np.median(self._losses)), min(self._losses), max(self._losses)
        if self._first is not None and median >= self._first:
            return None
        if self._lowest < 0:
            bound = median + self.spec.factor * (high - low)
            text = f"{loss:.4g}, far above its previous range {low:.4g} to {high:.4g}"
            return Firing(text, loss, bound) if low < high and loss > bound else None
        bound = max(self.spec.factor * median, LARGEST * max([*self._losses][-self.spec.after :]))
        if median <= 0 or loss <= bound:
            return None
        return Firing(f"{loss:.4g}, {loss / median:,.0f} times its median {median:.4g}", loss, bound)

    def bounds(self) -> Bounds | None:
        if self._first is None or self._holds or self._jump:
            return None
        if self._lowest < 0:
            lowest = self._lowest - (max(self._losses) - min(self._losses))
            return Bounds("loss", lowest, 0.5 * (self._first + lowest))
        low = min(self._losses) / SLACK
        return Bounds("loss", low, max(0.5 * self._first, self.spec.factor * low))

    def remember(self, steps: QuietSteps) -> None:
        self._losses.extend(steps.losses)
        self._lowest = min(self._lowest, *steps.losses) if steps.losses else self._lowest
