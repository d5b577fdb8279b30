"""Rule: some classes have far fewer samples than others."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Annotated

import numpy as np
from pydantic import Field

from ..config.rules import RuleBase
from ..fields.field_types import Count
from .rule import TARGETS, Bounds, CatalogueRule, Firing
from .step_rows import StepRows

MAX_CLASSES = 1000  # with more different targets, the task is not classification
CHANCE = 1e-3  # of so many samples more by chance, in any pair of classes


class ClassImbalanceRule(RuleBase):
    """The most frequent class has many more samples than the rarest one (SageMaker Debugger: ClassImbalance, 10), or all samples.

    It fires if the ratio is larger by more than chance: of 100 classes with equally many samples, the first 500 samples have none of
    some classes. The number of the most frequent one, among the samples of both, has a binomial distribution.
    It reads the targets of the table `samples`: those of batches in which a tensor is recorded, without `keep`, or all with
    `data.ids=all`.
    """

    above: Annotated[float, Field(ge=1)] = Field(10.0, description="The ratio of both numbers exceeds this number.")
    after: Count = Field(500, description="How many samples are counted first.")


class ClassImbalance(CatalogueRule[ClassImbalanceRule], name="class_imbalance"):
    source = "targets"
    saved = ("counts", "done")
    what = "class imbalance"
    stage = "targets"
    advice = "Sample the classes evenly with data.sampler, or weight the loss."
    requires = "the targets of samples: set data.ids=all, or record tensors"

    def __init__(self, spec: ClassImbalanceRule) -> None:
        super().__init__(spec)
        self._counts: Counter[int] = Counter()
        self._done = False

    def update(self, rows: StepRows) -> Iterator[Firing]:
        if self._done or not rows.is_training or not len(rows.targets):
            return
        targets, counts = np.unique(rows.targets, return_counts=True)
        if not (targets % 1 == 0).all():  # no classes, or no target
            self._done = True
            return
        self._counts.update(dict(zip(targets.astype(np.int64).tolist(), counts.tolist(), strict=True)))
        if len(self._counts) > MAX_CLASSES:
            self._done = True
        elif self._counts.total() >= self.spec.after:
            ranked = self._counts.most_common()
            (most, many), (rarest, few) = ranked[0], ranked[-1]
            if len(ranked) == 1:
                self._done = True
                yield Firing(f"all {many:,} samples have class {most}", float(many), self.spec.above)
            elif many / few > self.spec.above and self._chance(many, few) * len(ranked) ** 2 < CHANCE:
                self._done = True
                text = f"class {most} has {many:,} samples, class {rarest} has {few:,}"
                yield Firing(text, many / few, self.spec.above)

    def _chance(self, many: int, few: int) -> float:
        """Return a bound of the probability of a number of samples of a class that is `above` times as frequent (Chernoff bound)."""
        of_all, expected = many / (many + few), self.spec.above / (1 + self.spec.above)
        information = of_all * math.log(of_all / expected) + (1 - of_all) * math.log((1 - of_all) / (1 - expected))
        return math.exp(-(many + few) * information)

    def bounds(self) -> Bounds | None:
        if self._done:
            return Bounds(TARGETS)
        return None if self._counts else Bounds(TARGETS, high=0)
