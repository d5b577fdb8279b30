"""Relation: the input of binary cross-entropy can be any probability, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

from .double_softmax import layer_of
from .relation import RELATIONS, Checked, Relation

_RANGES = {"Tanh": "tanh, from -1 to 1", "Relu": "relu, from 0 to infinity"}


@RELATIONS.register("wrong_range_of_loss")
class WrongRangeOfLoss(Relation):
    """Reads which operation computes the input of binary cross-entropy, before a clamp, from the graph of autograd."""

    sources = ("losses",)

    def check(self) -> Iterator[Checked]:
        calls = [call for call in self.training.binary_losses if not call.of_logits and call.operation]
        for call in calls:
            if call.operation in _RANGES:
                text = f"binary cross-entropy expects probabilities, and gets the clamped output of a {_RANGES[call.operation]}"
                yield Checked(False, None, text, layer_of(self.training, call.operation))
        if calls:
            yield Checked(True, len(calls), f"binary cross-entropy gets the output of {calls[0].operation}")
