"""Rule: learning rate not in effect."""

from __future__ import annotations

from typing import Literal

from ..config.rules import RULES, RuleBase
from .rule import RelationRule


class RateInEffectRule(RuleBase):
    """A learning rate is negative or not finite, a warm-up never ends, or a scheduler changes the rate of an optimizer without steps.

    A training of at least 100 steps ends in the warm-up if its rate rises until the end and was at most 1% of the configured one: the
    warm-up takes more than 10,000 steps, which are many (Devlin et al. 2019). Its schedule may count epochs or samples. A scheduler
    without effect was created for an earlier optimizer of the same parameters, so the rate in effect is not the one that it reports.
    """

    rule: Literal["rate_in_effect"]


@RULES.register("rate_in_effect")
class RateInEffect(RelationRule):
    fields = RateInEffectRule
    relation = "rate_in_effect"
    what = "learning rate not in effect"
    advice = "Check the length of the warm-up. Create the scheduler for the optimizer that makes the steps, and again if it is replaced."
