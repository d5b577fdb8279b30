"""Rule: a gradient scaler finds values that are not finite again and again."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from ..config.rules import PersistentRule
from ..fields.field_types import Count
from .relations import RelationRule
from .rule import RELATIONS, Bounds, Firing
from .step_rows import StepRows


class SkippedStepsRule(PersistentRule):
    for_: Count = Field(20, alias="for", description="How many steps in succession are skipped.")


class LossScale(RelationRule, name="loss_scale"):
    """The factor of the gradient scaler has fallen below 1, or many steps in succession were skipped.

    Some steps are skipped until the factor is found: 16 halve the initial one of PyTorch, 65,536, to 1. Below 1, it no longer keeps
    small gradients from becoming zero (Micikevicius et al. 2018), and it is the smallest one that DeepSpeed allows.
    """

    fields = SkippedStepsRule
    saved = ("times",)
    what = "gradient scaler finds no factor"
    advice = (
        "Find the gradients or losses that are not finite, for example with hooks=gradients, or compute in bfloat16."
    )
    spec: SkippedStepsRule

    def __init__(self, spec: SkippedStepsRule) -> None:
        super().__init__(spec)
        self._times = 0

    def update(self, rows: StepRows) -> Iterator[Firing]:
        yield from super().update(rows)
        skipped = rows.metric("skipped")
        if rows.is_training and skipped is not None:
            self._times = self._times + 1 if skipped else 0
            if self._times == self.spec.for_:
                yield Firing(f"{self._times} steps in succession were skipped", self._times)

    def bounds(self) -> list[Bounds] | None:
        return None if self._times else [Bounds(RELATIONS, high=0), Bounds("skipped", high=0)]
