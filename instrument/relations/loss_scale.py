"""Relation: the factor of a gradient scaler is at least 1, and is divided out before gradients are clipped."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch.optim import Optimizer

from .relation import RELATIONS, Checked, Relation

MINIMUM = 1.0
"""Below 1, the factor no longer protects small gradients, which is its purpose (Micikevicius et al. 2018, "Mixed Precision Training",
section 3.2). The smallest factor of DeepSpeed (`min_loss_scale`) is 1 too.
"""
LARGEST, SMALLEST_SCALE = 0.75, 1024.0
"""A clip that leaves less than 1 / scale ** LARGEST of a gradient was made for gradients that are smaller by the scale: after the
division, gradients would have to be clipped by a factor of more than 4,096 for the initial scale of PyTorch, 65,536. A sum of losses that
is divided by the number of tokens is not clipped: its norm and largest element differ from step to step."""
TOLERANCE = 0.01  # of the clipped norm or largest element, times the scale, which are those of the clip
TIMES = 3  # checked steps in succession


@RELATIONS.register("loss_scale")
class LossScale(Relation):
    """Reads the factor of the gradient scaler, and how much the loop reduces the gradient of a parameter before each step.

    A factor that is below 1 from the start was chosen.
    """

    _left: float | None = None  # the fraction of the gradient that is left in this step
    _times = 0
    _sizes: tuple[
        float, ...
    ] = ()  # the norm and the largest element of all gradients, times the scale, if little is left

    def attach(self) -> None:
        self._is_chosen = self.training.scaler is not None and self.training.scaler.get_scale() < MINIMUM

    def before_step(self, optimizer: Optimizer) -> None:
        if self.training.scaler is None:
            return
        for gradient in self.training.gradients[optimizer][:1]:
            change = gradient.relative_change()
            if change is not None and len(gradient.micro_steps) == 1:
                scale = self.training.scaler.get_scale()
                self._left = float(change) * scale
                sizes = _sizes(optimizer, scale) if scale >= SMALLEST_SCALE and 0 < self._left < scale**-LARGEST else ()
                is_same = any(
                    math.isclose(one, other, rel_tol=TOLERANCE) and one < scale**0.5
                    for one, other in zip(sizes, self._sizes, strict=False)
                )
                self._times = self._times + 1 if is_same else int(bool(sizes))
                self._sizes = sizes

    def check(self) -> Iterator[Checked]:
        if self.training.scaler is None:
            return
        left, self._left = self._left, None
        scale = self.training.scaler.get_scale()
        if left is not None and self._times == TIMES:
            text = f"the loop leaves {left:.2g} of each gradient, which is scaled by {scale:g}: it clips before it divides by the scale"
            yield Checked(False, left, text)
        elif not self._is_chosen:
            yield Checked(scale >= MINIMUM, scale, f"the gradient scaler multiplies the loss by {scale:g}")


def _sizes(optimizer: Optimizer, scale: float) -> tuple[float, float]:
    gradients = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
    norms = [float(each.float().norm()) for each in gradients]
    return scale * math.hypot(*norms), scale * max(float(each.float().abs().max()) for each in gradients)
