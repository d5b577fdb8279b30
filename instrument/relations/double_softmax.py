"""Relation: the input of a loss that applies a softmax or sigmoid is not the output of another one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from .relation import RELATIONS, Checked, Relation, Training

_MODULES = {"Softmax": nn.Softmax, "Sigmoid": nn.Sigmoid, "Tanh": nn.Tanh, "Relu": nn.ReLU, "Softplus": nn.Softplus}


@RELATIONS.register("double_softmax")
class DoubleSoftmax(Relation):
    """Reads which operation computes the input of cross-entropy, and of binary cross-entropy with logits, from the graph of autograd."""

    sources = ("losses",)

    def check(self) -> Iterator[Checked]:
        calls = [(call.operation, "a softmax") for call in self.training.losses]
        calls += [(call.operation, "a sigmoid") for call in self.training.binary_losses if call.of_logits]
        for operation, applied in calls:
            if operation in ("Softmax", "Sigmoid"):
                text = f"the loss applies {applied} to the output of a {operation.lower()}"
                yield Checked(False, None, text, layer_of(self.training, operation))
        if any(operation for operation, _ in calls):
            yield Checked(True, len(calls), "the input of the loss is not the output of a softmax or sigmoid")


def layer_of(training: Training, operation: str) -> str:
    """Return the name of the module that computes the output: the last one, or the only one of its type; empty if it is unknown."""
    parts = [(name, type(part)) for name, part in training.modules.items() if not any(part.children())]
    names = [name for name, kind in parts if kind is _MODULES[operation]]
    return names[-1] if names and (len(names) == 1 or names[-1] == parts[-1][0]) else ""
