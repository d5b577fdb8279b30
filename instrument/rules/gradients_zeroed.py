"""Rule: gradients are not zeroed."""

from __future__ import annotations

from typing import Literal

from ..config.rules import RULES, RuleBase
from .rule import RelationRule


class GradientsZeroedRule(RuleBase):
    """A gradient is added to that of the previous step, because no code zeroes it.

    A few parameters of each optimizer are observed. Gradients of micro-batches are added within a step. The check is that of TrainCheck
    (Jiang et al., OSDI 2025) for a missing `zero_grad`.
    """

    rule: Literal["gradients_zeroed"]


@RULES.register("gradients_zeroed")
class GradientsZeroed(RelationRule):
    fields = GradientsZeroedRule
    relation = "gradients_zeroed"
    what = "gradients are not zeroed"
    advice = "Call optimizer.zero_grad() once in each step, before the first backward pass."
