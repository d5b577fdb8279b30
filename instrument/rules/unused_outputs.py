"""Rule: a classifier has at least twice as many outputs as its targets need."""

from __future__ import annotations

from typing import Literal

from ..config.rules import RULES, RuleBase
from .rule import RelationRule


class UnusedOutputsRule(RuleBase):
    """No target of cross-entropy is in the upper half of the classes: labels are wrong, or the model has too many outputs.

    The number of outputs has to be that of the classes (NeuraLint: Nikanjam et al. 2021, https://arxiv.org/abs/2105.08095). It is decided
    after 16 samples per class, at least 200. Two classes, language models, and losses other than the
    mean, such as those of policies, do not count. A model that learns its classes one after another is reported.
    """

    rule: Literal["unused_outputs"]


@RULES.register("unused_outputs")
class UnusedOutputs(RelationRule):
    fields = UnusedOutputsRule
    relation = "unused_outputs"
    what = "outputs that no target uses"
    advice = "Check how the labels are computed, and the number of outputs of the model."
