"""Rule: the loss compares each prediction with all targets."""

from __future__ import annotations

from typing import Literal

from ..config.rules import RULES, RuleBase
from .rule import RelationRule


class LossBroadcastsRule(RuleBase):
    """`mse_loss`, `l1_loss`, `smooth_l1_loss` or `huber_loss` gets predictions [samples, 1] and targets [samples], or vice versa.

    The loss is then the mean over all pairs of a prediction and a target, whose minimum is the same prediction for all samples: the
    mean of the targets (for `mse_loss`). PyTorch warns of the shapes (torch.nn.functional.mse_loss), and not of other broadcasts.
    """

    rule: Literal["loss_broadcasts"]


@RULES.register("loss_broadcasts")
class LossBroadcasts(RelationRule):
    fields = LossBroadcastsRule
    relation = "loss_broadcasts"
    what = "predictions are compared with other targets"
    advice = "Give the output and the targets the same shape, such as output.squeeze(1)."
