"""Rule: wrong mode of the model."""

from __future__ import annotations

from typing import Literal

from ..config.rules import RULES, RuleBase
from .rule import RelationRule


class ModeOfPhaseRule(RuleBase):
    """A training step runs in evaluation mode, or an evaluation in training mode, with dropout or batch normalization.

    In training steps, the complete model is in evaluation mode: since an evaluation, or from the start with dropout in a part that
    is trained. Frozen batch normalization in a model in training mode is correct, and so is dropout in a model that evaluates.
    TrainCheck (Jiang et al., OSDI 2025) learns such relations.
    """

    rule: Literal["mode_of_phase"]


@RULES.register("mode_of_phase")
class ModeOfPhase(RelationRule):
    fields = ModeOfPhaseRule
    relation = "mode_of_phase"
    what = "wrong mode of the model"
    advice = "Call model.train() before the training steps, also after each evaluation, and model.eval() before an evaluation."
