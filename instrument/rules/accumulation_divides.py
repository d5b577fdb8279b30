"""Rule: gradients of micro-batches are added without a division."""

from __future__ import annotations

from typing import Literal

from ..config.rules import RULES, RuleBase
from .rule import RelationRule


class AccumulationDividesRule(RuleBase):
    """The gradients of several micro-batches are added, but the mean of each counts completely instead of its share.

    The step is then as many times larger as with one large batch. Cross-entropies with `reduction="mean"` are checked, in one process,
    if the loop reports its micro-batches with `end_micro_step`. The tutorial of Accelerate on gradient accumulation divides the loss
    for this reason.
    """

    rule: Literal["accumulation_divides"]


@RULES.register("accumulation_divides")
class AccumulationDivides(RelationRule):
    fields = AccumulationDividesRule
    relation = "accumulation_divides"
    what = "accumulated gradients are not divided"
    advice = "Divide the loss of each micro-batch by their number before backward()."
