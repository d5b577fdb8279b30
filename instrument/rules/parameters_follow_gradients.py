"""Rule: parameters do not follow their gradients."""

from __future__ import annotations

from typing import Literal

from ..config.rules import RULES, RuleBase
from .rule import RelationRule


class ParametersFollowGradientsRule(RuleBase):
    """Optimizers do not change parameters that have a gradient, or change frozen ones.

    Reported are: an optimizer that changes none of its parameters in 4 checked steps, although gradients and learning rates are not
    zero; a parameter with a gradient that no optimizer holds, because it replaced another one or because it was left out; and a frozen
    parameter that an optimizer still changes. Parameters that are left out before all others, or that are the majority, are not
    reported: such a choice is usual in fine-tuning. TrainCheck (Jiang et al., OSDI 2025) learns these relations.
    """

    rule: Literal["parameters_follow_gradients"]


@RULES.register("parameters_follow_gradients")
class ParametersFollowGradients(RelationRule):
    fields = ParametersFollowGradientsRule
    relation = "parameters_follow_gradients"
    what = "parameters do not follow their gradients"
    advice = (
        "Create the optimizer after the model has its final parameters, and pass all trainable parameters to it; "
        "set the gradient of a parameter that becomes frozen to None."
    )
