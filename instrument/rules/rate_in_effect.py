"""Rule: learning rate without effect."""

from __future__ import annotations

from typing import Literal

from ..config.rules import RULES, RuleBase
from .rule import RelationRule


class RateInEffectRule(RuleBase):
    """A learning rate is negative or not finite, or a scheduler changes the rate of an optimizer that makes no steps.

    Such a scheduler was created for an earlier optimizer of the same parameters, so the rate in effect is not the one that it reports.
    """

    rule: Literal["rate_in_effect"]


@RULES.register("rate_in_effect")
class RateInEffect(RelationRule):
    fields = RateInEffectRule
    relation = "rate_in_effect"
    what = "learning rate without effect"
    advice = "Create the scheduler for the optimizer that makes the steps, and again if that optimizer is replaced."
