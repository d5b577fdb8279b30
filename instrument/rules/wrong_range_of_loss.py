"""Rule: the range of an output does not fit the loss."""

from __future__ import annotations

from typing import Literal

from ..config.rules import RULES, RuleBase
from .rule import RelationRule


class WrongRangeOfLossRule(RuleBase):
    """`torch.nn.functional.binary_cross_entropy` gets the output of a Tanh or ReLU, which is clamped to probabilities.

    A clamped output has no gradient. PyTorch raises an error for values outside 0 to 1 without a clamp. The loss is that of a Bernoulli
    distribution, whose probability a sigmoid computes (Goodfellow et al. 2016, Deep Learning, section 6.2.2.2).
    """

    rule: Literal["wrong_range_of_loss"]


@RULES.register("wrong_range_of_loss")
class WrongRangeOfLoss(RelationRule):
    fields = WrongRangeOfLossRule
    relation = "wrong_range_of_loss"
    what = "range of the output does not fit the loss"
    advice = "Remove the activation and the clamp, and use binary_cross_entropy_with_logits."
