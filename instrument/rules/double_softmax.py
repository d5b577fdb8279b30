"""Rule: the loss applies a softmax to probabilities."""

from __future__ import annotations

from typing import Literal

from ..config.rules import RULES, RuleBase
from .rule import RelationRule


class DoubleSoftmaxRule(RuleBase):
    """A loss that applies a softmax or a sigmoid gets the output of another one: a Softmax followed by CrossEntropyLoss, for example.

    `torch.nn.functional.cross_entropy` and `binary_cross_entropy_with_logits` expect logits. With K classes, the loss of
    probabilities is at least log(1 + (K - 1) / e), so that it cannot become small. Views, casts and clamps between both are ignored.
    """

    rule: Literal["double_softmax"]


@RULES.register("double_softmax")
class DoubleSoftmax(RelationRule):
    fields = DoubleSoftmaxRule
    relation = "double_softmax"
    what = "softmax applied twice"
    advice = "Remove this layer, and pass its input to the loss function, which expects logits."
