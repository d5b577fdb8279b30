"""Rule: the model overfits."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pydantic import Field

from ..config.rules import PersistentRule
from ..fields.field_types import Count, NonNegative
from .rule import Bounds, CatalogueRule, Firing, QuietSteps
from .step_rows import StepRows

RISE = 0.5  # how far the evaluation loss has to be above its minimum, relative to the minimum and to what was learned before


class OverfitRule(PersistentRule):
    """The evaluation loss is far above the training loss since the last evaluation, and rises.

    Each of these evaluations is worse than the one before: the loss of a large learning rate goes up and down. The rise above the minimum
    exceeds half of the minimum, and undoes half of the decrease from the first training loss to the minimum: the loss of a few wrong but
    confident predictions rises in healthy trainings too. Negative losses do not count: their ratio has no meaning.
    SageMaker Debugger (Overfit) has a ratio of 0.1, which most trainings on little data exceed.
    """

    above: NonNegative = Field(
        1.0, description="(evaluation loss - training loss) / training loss exceeds this number."
    )
    for_: Count = Field(3, alias="for", description="In how many evaluations in succession.")


class Overfit(CatalogueRule[OverfitRule], name="overfit"):
    source = "evaluations"
    saved = ("sum", "count", "lowest", "last", "first", "times")
    what = "overfitting"
    stage = "learning"
    advice = "Stop earlier, use more data or augmentation, or increase the weight decay."
    requires = "evaluations: set train.eval_every"

    def __init__(self, spec: OverfitRule) -> None:
        super().__init__(spec)
        self._sum, self._count = 0.0, 0  # of the training losses since the last evaluation
        self._lowest = self._last = math.inf  # of the evaluations
        self._first: float | None = None  # the first training loss
        self._times = 0

    def update(self, rows: StepRows) -> Iterator[Firing]:
        loss = rows.metric("loss")
        if loss is None or not math.isfinite(loss):
            return
        if rows.is_training:
            self._add([loss])
        elif rows.phase == "eval" and self._count:
            training = self._sum / self._count
            self._sum, self._count = 0.0, 0
            self._lowest = min(self._lowest, loss)
            ratio = (loss - training) / training if training > 0 and self._lowest >= 0 else 0.0
            learned = max(abs(self._lowest), (self._first or 0.0) - self._lowest)
            has_risen, self._last = loss > self._last and loss - self._lowest > RISE * learned, loss
            self._times = self._times + 1 if ratio > self.spec.above and has_risen else 0
            if self._times == self.spec.for_:
                text = f"evaluation loss {loss:.4g}, training loss {training:.4g}, lowest evaluation loss {self._lowest:.4g}"
                yield Firing(text, ratio, self.spec.above)

    def _add(self, losses: Sequence[float]) -> None:
        for loss in losses:
            self._sum += loss
        self._count += len(losses)
        self._first = losses[0] if losses and self._first is None else self._first

    def bounds(self) -> Bounds | None:
        return Bounds("loss")

    def remember(self, steps: QuietSteps) -> None:
        self._add(steps.losses)
