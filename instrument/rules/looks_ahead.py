"""Rule: a model of the next token uses later tokens."""

from __future__ import annotations

from typing import Literal

from ..config.rules import RULES, RuleBase
from .rule import RelationRule


class LooksAheadRule(RuleBase):
    """The outputs of a model that is trained on the next token depend on later tokens, which it has to predict.

    The usual cause is attention without a causal mask (Vaswani et al., 2017, section 3.2.3). After the first step, a copy of the model is
    called again in evaluation mode, with one token of the first batch changed; an output at an earlier position may not change by more
    than 1e-4 of the largest output (1e-2 in half precision). Models with an encoder and a decoder are not checked.
    """

    rule: Literal["looks_ahead"]


@RULES.register("looks_ahead")
class LooksAhead(RelationRule):
    fields = LooksAheadRule
    relation = "looks_ahead"
    what = "model of the next token uses later tokens"
    advice = "Pass a causal mask to the attention, or is_causal=True, and check layers that mix positions."
