"""Relation: the output of a model can reach the minimum of its loss."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from .double_softmax import layer_of
from .observations import OF_NUMBERS, TOLERANCE, is_readable
from .relation import RELATIONS, Checked, Relation

_RANGES = {
    "Tanh": ("tanh, from -1 to 1", -1.0, 1.0),
    "Relu": ("relu, from 0 to infinity", 0.0, math.inf),
    "Softplus": ("softplus, from 0 to infinity", 0.0, math.inf),
    "Sigmoid": ("sigmoid, from 0 to 1", 0.0, 1.0),
    "Softmax": ("softmax, from 0 to 1", 0.0, 1.0),
}
_NO_LOGARITHMS = ("Addmm", "Mm", "Convolution", *_RANGES)  # whose results are not logarithms of probabilities
_OF_LOGITS = ("Tanh", "Relu")  # the others are those of `double_softmax`
MIN_TARGETS = 16
LARGEST = 0.05  # the largest fraction of targets outside of the range, and of their mean squared distance to it in their variance


@RELATIONS.register("wrong_range_of_loss")
class WrongRangeOfLoss(Relation):
    """Reads which operation computes the input of a loss, before a clamp, from the graph of autograd, and the range of the targets."""

    sources = ("losses",)

    def check(self) -> Iterator[Checked]:
        training, count = self.training, 0
        for operation, is_wrong, expected in self._inputs():
            if is_wrong and operation in _RANGES:
                text = f"{expected}, and gets the output of a {_RANGES[operation][0]}"
                yield Checked(False, None, text, layer_of(training, operation))
            elif is_wrong:
                yield Checked(False, None, expected)
            count += 1
        if count:
            yield Checked(True, count, "the output has the range of the loss")

    def _inputs(self) -> Iterator[tuple[str, bool, str]]:
        """Yield for each loss the operation that computes its input, whether the range is wrong, and what it expects."""
        for binary in self.training.binary_losses:
            if binary.operation == "Softmax" and not binary.of_logits:
                is_of_samples = binary.sums is not None and bool(((binary.sums - 1).abs() <= TOLERANCE).all())
                has_several = is_of_samples and bool(((binary.targets > 0.5).sum(1) > 1).any())
                yield binary.operation, has_several, "binary cross-entropy has samples with several targets of 1"
            elif binary.operation and not binary.of_logits:
                is_wrong = binary.operation in ("Tanh", "Relu", "Softplus")
                yield binary.operation, is_wrong, "binary cross-entropy expects probabilities"
            elif binary.operation in _OF_LOGITS:
                yield binary.operation, True, "binary cross-entropy with logits expects any number"
        for call in self.training.losses:
            if call.operation in _OF_LOGITS:
                yield call.operation, True, "cross-entropy expects logits of any value"
            elif call.is_likelihood and call.logits is not None:
                text = f"nll_loss expects logarithms of probabilities, and gets {call.logits[0].tolist()[:4]}, ..."
                yield "", not call.has_probabilities(), text
        for pair in self.training.pair_losses:
            if pair.name in ("kl_div", "ctc_loss"):
                text = f"{pair.name} expects logarithms of probabilities, such as those of log_softmax"
                yield pair.operation, pair.operation in _NO_LOGARITHMS, text
                if pair.name == "ctc_loss" and is_readable(pair.targets):
                    yield "", bool((pair.targets == 0).any()), "ctc_loss has its blank among the targets"
            elif pair.name not in OF_NUMBERS:
                has_signs = not is_readable(pair.targets) or bool((pair.targets < 0).any() | (pair.targets == 1).all())
                yield "", not has_signs, f"{pair.name} expects targets of 1 and -1, and gets none of -1, but others"
            elif pair.operation in _RANGES:
                outside = _outside(pair.targets, *_RANGES[pair.operation][1:])
                text = f"{pair.name} has {outside:.0%} of its targets outside of the range"
                yield pair.operation, outside > LARGEST, text


def _outside(targets: Tensor, low: float, high: float) -> float:
    """Return the fraction of targets that an output cannot reach; 0 for few targets, or if they are near its range, such as noise."""
    if not is_readable(targets) or targets.numel() < MIN_TARGETS:
        return 0.0
    values = targets.detach().float()
    distances = values - values.clamp(low, high)
    is_far = bool(distances.square().mean() > LARGEST * values.var())
    return float((distances != 0).float().mean()) if is_far else 0.0
