"""Rule: the loss applies a softmax to probabilities."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from pydantic import Field

from ..config.rules import RULES, PersistentRule
from ..fields.field_types import Count
from .rule import Firing, PersistentLocatedRule
from .step_rows import BoolArray, Chosen, Location, StepRows

ZERO_MEAN = 1e-3  # relative to the rms
TOLERANCE = 1e-3
SIGMOID_OF_ONE = 1 / (1 + math.exp(-1))


class DoubleSoftmaxRule(PersistentRule):
    """The loss applies a softmax or sigmoid to probabilities: a Softmax followed by CrossEntropyLoss, or a Sigmoid by BCEWithLogitsLoss.

    It compares three numbers with those of such a loss, which probabilities limit. With K classes, the mean cross-entropy is between
    log(1 + (K - 1) / e) and log(1 + (K - 1) e), and the largest gradient of a sample is between 1 - e / (e + K - 1) and 1. The
    gradients of a sample have the sum 0, as a softmax ignores a constant that is added to its input.
    """

    rule: Literal["double_softmax"]
    for_: Count = Field(3, alias="for", description="How often in succession the condition has to hold.")


@RULES.register("double_softmax")
class DoubleSoftmax(PersistentLocatedRule[DoubleSoftmaxRule]):
    fields = DoubleSoftmaxRule
    what = "softmax applied twice"
    stage = "setup"
    evidence = "rms"
    advice = "Remove this layer, and pass its input to the loss function, which expects logits."
    requires = (
        "the outputs (kind: forward) of Softmax or Sigmoid layers and their gradients (kind: full_backward, role: grad_output) with the "
        "statistics mean, rms and abs_max, such as hooks=[activations,gradients]"
    )
    statistics = ("mean", "rms", "abs_max")

    def selects(self, location: Location) -> bool:
        is_read = location.is_output or (location.kind == "full_backward" and location.role == "grad_output")
        return is_read and location.module_type in ("Softmax", "Sigmoid") and location.phase == "train"

    def holds(self, rows: StepRows, chosen: Chosen) -> BoolArray:
        holds = np.zeros(len(chosen.locations), np.bool_)
        loss = rows.metric("loss")
        if loss is None:
            return holds
        means, rms, largest = (chosen.values(rows.column(name), self.merge) for name in self.statistics)
        numel = chosen.values(rows.counts("numel"), self.merge)
        outputs = {location.layer: at for at, location in enumerate(chosen.locations) if location.is_output}
        for at, location in enumerate(chosen.locations):
            output = outputs.get(location.layer)
            if not location.is_gradient or output is None:
                continue
            if location.module_type == "Sigmoid":
                holds[at] = _is_of_sigmoid(loss, rms[at] * numel[at], largest[at] * numel[at])
            elif abs(means[at]) < ZERO_MEAN * rms[at]:
                holds[at] = _is_of_softmax(loss, largest[at] * numel[at] * means[output], 1 / means[output])
        return holds

    def firing(self, rows: StepRows, chosen: Chosen, at: int) -> Firing:
        text = f"loss {rows.metric('loss'):.4g} and the gradient are those of probabilities as logits"
        return Firing(text, rows.metric("loss"), None, chosen.locations[at])


def _is_of_softmax(loss: float, largest: float, classes: float) -> bool:
    """Return whether a loss and the largest gradient, times the number of samples, are in the range for probabilities."""
    low, high = math.log(1 + (classes - 1) / math.e), math.log(1 + (classes - 1) * math.e)
    smallest = 1 - math.e / (math.e + classes - 1)  # of the true class, if its probability is 1
    return _within(loss, low, high) and _within(largest, smallest, 1.0)


def _is_of_sigmoid(loss: float, rms: float, largest: float) -> bool:
    """Return whether a loss, and the rms and the largest gradient, times their number, are in the range for probabilities."""
    low, high = -math.log(SIGMOID_OF_ONE), -math.log(1 - SIGMOID_OF_ONE)
    is_bounded = _within(largest, 1 - SIGMOID_OF_ONE, SIGMOID_OF_ONE) and _within(
        rms, 1 - SIGMOID_OF_ONE, SIGMOID_OF_ONE
    )
    return _within(loss, low, high) and is_bounded


def _within(value: float, low: float, high: float) -> bool:
    return low * (1 - TOLERANCE) <= value <= high * (1 + TOLERANCE)
