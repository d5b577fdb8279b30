"""Relation: the losses of the micro-batches of a step are divided by their number."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from .observations import LossCall
from .relation import RELATIONS, Checked, Relation, Training

MAX_LOSSES = 16  # of a micro-step; a loop may compute any number of losses before its step ends


class _Step(NamedTuple):
    """The gradients of the losses of each micro-step in a step of an optimizer, and the factor of a gradient before the step."""

    seeds: list[list[Tensor]]
    change: Tensor | None


@RELATIONS.register("accumulation_divides")
class AccumulationDivides(Relation):
    """Reads the gradients that arrive at the means of cross-entropies, in steps of one process with several micro-steps.

    If they are 1 in each of n micro-steps, the sum of the gradients is n times the gradient of one batch. This is correct if the loop
    divides the gradients before the step. A clip that divides by more than n could hide this, so the step is then not checked.
    """

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._seeds: defaultdict[int, list[Tensor]] = defaultdict(list)  # by micro-step
        self._steps: list[_Step] = []

    def on_loss(self, call: LossCall) -> None:
        if self.training.clock.parallel is None and call.is_mean and call.result.requires_grad:
            call.result.register_hook(partial(self._on_gradient, self.training.clock.moment.micro_step))

    def _on_gradient(self, micro_step: int, gradient: Tensor) -> None:
        clock = self.training.clock
        if not clock.closed and clock.moment.micro_step == micro_step and len(self._seeds[micro_step]) < MAX_LOSSES:
            scale = 1.0 if clock.amp_scale is None else clock.amp_scale()
            self._seeds[micro_step].append(gradient.detach() / scale)

    def before_step(self, optimizer: Optimizer) -> None:
        for gradient in self.training.gradients[optimizer][:1]:
            parts = gradient.micro_steps
            seeds = [self._seeds[each] for each in parts if each in self._seeds]
            if len(parts) > 1 and len({*parts}) == len(parts) == len(seeds) and not gradient.has_old:
                change, scale = gradient.relative_change(), self.training.clock.amp_scale
                if change is not None and scale is not None:
                    change = change * scale().to(change.device)
                self._steps.append(_Step(seeds, change))

    def check(self) -> Iterator[Checked]:
        steps, self._steps = self._steps, []
        self._seeds.clear()
        for seeds, change in steps:
            count, numbers = len(seeds), [torch.stack(each).tolist() for each in seeds]
            is_divided = change is None or not float(change) > 1.001 / count
            if all(number == 1.0 for each in numbers for number in each):
                if not is_divided:
                    text = f"the gradients of {count} micro-batches were added, but the losses are not divided by this number"
                    yield Checked(False, count, text)
            elif abs(sum(each[0] for each in numbers) - 1.0) < 1e-3:
                yield Checked(True, count, f"the losses of {count} micro-batches count 1 together")
