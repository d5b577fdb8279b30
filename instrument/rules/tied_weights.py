"""Rule: weights that were tied differ."""

from __future__ import annotations

from typing import Literal

from ..config.rules import RULES, RuleBase
from .rule import RelationRule


class TiedWeightsRule(RuleBase):
    """Parameters that were one parameter at the start, such as the embeddings of input and output, have different values.

    Also the embeddings of a model of transformers whose configuration declares `tie_word_embeddings` (Press and Wolf, 2017). TrainCheck
    (Jiang et al., OSDI 2025) finds such faults by the same relation.
    """

    rule: Literal["tied_weights"]


@RULES.register("tied_weights")
class TiedWeights(RelationRule):
    fields = TiedWeightsRule
    relation = "tied_weights"
    what = "tied weights differ"
    advice = (
        "Tie the weights again after loading, copying or replacing a parameter, and before the optimizer is created."
    )
