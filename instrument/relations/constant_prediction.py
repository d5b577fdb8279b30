"""Relation: the first loss is not far above that of a uniform prediction. Also the loss of a constant prediction, and moving targets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .observations import OF_NUMBERS, BinaryLossCall, LossCall, PairLossCall, is_readable
from .relation import RELATIONS, Checked, Relation, Training

FACTOR, DIFFERENCE = 3.0, 3.0  # how far the first loss may be above that of a uniform prediction
MIN_TARGETS, PER_CLASS, MIN_PAIRS = 200, 16, 16
MOVED = 4.0  # how many times the mean squared distance of the targets from their first mean has to grow
_SCALED = ("Mul", "Div", "Where")
MIN_ENTROPY = 0.5  # of that of equally frequent classes; the loss of rare classes is small from the start


@RELATIONS.register("constant_prediction")
class ConstantPrediction(Relation):
    """Reads the targets of means of cross-entropy without weights, and of `mse_loss`, in checked steps."""

    sources = ("losses",)

    _first_targets: tuple[float, float] | None = None  # their mean and variance

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._counts = torch.zeros(0)  # targets by class
        self._is_new = True

    def attach(self) -> None:
        self._is_new = all(parameter.grad is None for parameter in self.training.model.parameters())

    def check(self) -> Iterator[Checked]:
        classes = {call.shape[min(1, len(call.shape) - 1)] for call in self.training.losses}
        if len(classes) == 1 and all(call.is_mean and call.weight is None for call in self.training.losses):
            yield from self._check_classes(self.training.losses, *classes)
        pairs = self.training.pair_losses
        yield from self._check_opponents()
        yield from self._check_targets([call for call in pairs if call.name in OF_NUMBERS][:1])
        if pairs and not self.training.losses and all(_is_comparable(call) for call in pairs):
            loss = _mean([call.result for call in pairs])
            variance = _mean([call.targets.detach().float().var(0).mean() for call in pairs])
            if variance > 0 and loss > 0:
                text = f"the variance of the targets is {variance:.4g}"
                yield Checked(True, variance / loss, text, path="mse_loss")

    def _check_opponents(self) -> Iterator[Checked]:
        """Report optimizers with opposite targets, as those of a GAN: the loss of one rises as that of the other falls."""
        calls: list[BinaryLossCall | PairLossCall] = [*self.training.binary_losses, *self.training.pair_losses]
        if len(self.training.optimizers) > 1:
            targets = (each.targets.detach() for each in calls if is_readable(each.targets))
            values = {tuple(map(float, each.aminmax())) for each in targets if each.numel() and not each.is_complex()}
            if len(values) > 1 and all(low == high for low, high in values):
                yield Checked(None, 1.0, f"the targets of {len(values)} losses are constant, and differ")

    def _check_targets(self, pairs: Sequence[PairLossCall]) -> Iterator[Checked]:
        """Report targets that move: they are computed by a network that is trained, as those of Q-learning."""
        for all_targets in [call.targets for call in pairs if is_readable(call.targets)]:
            if all_targets.numel() < MIN_PAIRS or all_targets.is_complex():
                continue
            targets = all_targets.detach().float()
            mean, variance = self._first_targets = self._first_targets or (float(targets.mean()), float(targets.var()))
            ratio = float((targets - mean).square().mean()) / variance if variance else 0.0
            if ratio > MOVED:
                yield Checked(None, ratio, f"the targets move: their spread is {ratio:.3g} times the first one")

    def _check_classes(self, calls: Sequence[LossCall], classes: int) -> Iterator[Checked]:
        loss, uniform = _mean([call.result for call in calls]), math.log(classes)
        is_first = self._is_new and self.training.clock.moment.step == 0
        is_first = is_first and all(call.has_probabilities() and call.operation not in _SCALED for call in calls)
        if is_first and loss > max(FACTOR * uniform, uniform + DIFFERENCE):
            text = f"the first loss is {loss:.3g}, and that of a uniform prediction of {classes} classes {uniform:.3g}"
            yield Checked(False, loss / uniform, text)
        for call in calls:
            targets = call.targets[call.targets != call.ignore_index].flatten().cpu()
            counts = torch.bincount(targets, minlength=classes)
            self._counts = counts if len(self._counts) != len(counts) else self._counts + counts
        seen = self._counts[self._counts > 0].double()
        total = float(seen.sum())
        entropy = float(-(seen / total * (seen / total).log()).sum()) if total else 0.0
        is_known = total >= max(MIN_TARGETS, PER_CLASS * len(seen)) and entropy > MIN_ENTROPY * math.log(len(seen))
        is_only_term = not (self.training.pair_losses or self.training.binary_losses)  # the weights of terms may change
        if is_known and is_only_term and loss > 0 and entropy > 0:
            yield Checked(True, entropy / loss, f"the entropy of {int(total)} targets is {entropy:.4g}")


def _is_comparable(call: PairLossCall) -> bool:
    is_batch = is_readable(call.targets) and call.targets.ndim > 0 and len(call.targets) >= MIN_PAIRS
    return call.name == "mse_loss" and call.result.ndim == 0 and is_batch and not call.broadcasts


def _mean(numbers: Sequence[Tensor]) -> float:
    return float(torch.stack([number.detach().float().mean() for number in numbers]).mean())
