"""Rule: the labels of a language model are not the next tokens."""

from __future__ import annotations

from typing import Literal

from ..config.rules import RULES, RuleBase
from .rule import RelationRule


class LabelsShiftedRule(RuleBase):
    """A model that uses only earlier tokens is trained on the token that it sees, on the token after the next one, or on the previous one.

    The targets of cross-entropy are compared with the integer inputs of the model, [samples, positions]. Whether the model uses only
    earlier tokens is tested: it is called again with one other token. Masked language models, autoencoders, and models with any
    output for the next token are not reported. The models of transformers shift labels themselves; labels that the loop has shifted
    are then shifted twice (https://huggingface.co/docs/transformers/model_doc/gpt2, `labels`). Targets that are the next tokens of other
    samples of the batch are reported too: inputs and labels have different orders.
    """

    rule: Literal["labels_shifted"]


@RULES.register("labels_shifted")
class LabelsShifted(RelationRule):
    fields = LabelsShiftedRule
    relation = "labels_shifted"
    what = "labels are not the next tokens"
    advice = "Keep inputs and labels in the same order, and shift the labels once: in the loop, or in a model that shifts them."
