"""Rule: padding counts in the loss of a language model."""

from __future__ import annotations

from typing import Literal

from ..config.rules import RULES, RuleBase
from .rule import RelationRule


class PaddingInLossRule(RuleBase):
    """Cross-entropy counts targets at padded positions of the input, so that the model learns to predict padding.

    Padding is where the argument `attention_mask` of the model is 0, or where its input is `config.pad_token_id`. It is expected at the
    end or the start of a sample. Losses with `reduction="none"` or with class weights are not checked, since they may leave these targets
    out in another way.
    """

    rule: Literal["padding_in_loss"]


@RULES.register("padding_in_loss")
class PaddingInLoss(RelationRule):
    fields = PaddingInLossRule
    relation = "padding_in_loss"
    what = "padding counts in the loss"
    advice = "Set the labels at padded positions to -100, or pass ignore_index= to the loss."
