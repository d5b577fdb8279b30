"""Rule: all tokens have the same position."""

from __future__ import annotations

from typing import Literal

from ..config.rules import RULES, RuleBase
from .rule import RelationRule


class PositionsDifferRule(RuleBase):
    """The argument `position_ids` of the model has one value for all tokens of all samples.

    Attention without positions does not use the order of tokens (Vaswani et al. 2017, section 3.5). Fewer than 4 tokens are not checked.
    """

    rule: Literal["positions_differ"]


@RULES.register("positions_differ")
class PositionsDiffer(RelationRule):
    fields = PositionsDifferRule
    relation = "positions_differ"
    what = "tokens with the same position"
    advice = "Do not pass position_ids, or count them from 0 in each sample."
