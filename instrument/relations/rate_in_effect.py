"""Relation: the learning rates are finite and not negative, and schedulers change those of the optimizers that make the steps."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..hooks.optimizer import as_rate, parameter_ids
from .observations import ObservedFunctions
from .relation import RELATIONS, Checked, Relation, Training

FEWEST_STEPS = 100  # of a training whose warm-up is judged
WARM = 0.01  # of the configured rate; the warm-up takes a hundred times as many steps as the training
MAX_SCHEDULERS, FEWEST_PER_STEP = 16, 20  # a schedule that made less than a twentieth of its steps is not in effect
LONGEST = 1.1  # times the length of a schedule: a longer training only started a schedule of epochs
FACTOR = 0.1  # a larger rate of a schedule is a factor of its formula


def _observed(name: str, original: Callable[..., None]) -> Callable[..., None]:  # noqa: ARG001
    @wraps(original)
    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        for observer in _STEPS.observers:
            observer(self)
        original(self, *args, **kwargs)

    return step


_STEPS = ObservedFunctions([(LRScheduler, "step")], _observed)


@RELATIONS.register("rate_in_effect")
class RateInEffect(Relation):
    """Reads the learning rates at the steps of optimizers, and observes the steps of schedulers."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._invalid: dict[str, float] = {}
        self._schedulers: dict[str, LRScheduler] = {}  # by class: those without effect
        self._steps: Counter[LRScheduler] = Counter()  # of each scheduler that changes a rate in effect
        self._count = 0
        self._largest: dict[Optimizer, float] = {}  # the largest rate, as a fraction of the configured one

    def attach(self) -> None:
        self._start = self.training.clock.moment.step
        _STEPS.add(self._on_scheduler)

    def detach(self) -> None:
        _STEPS.remove(self._on_scheduler)
        self._schedulers.clear()

    def before_step(self, optimizer: Optimizer) -> None:
        self._count += 1
        self._largest[optimizer] = max(self._largest.get(optimizer, 0.0), _fraction(optimizer))
        for index, group in enumerate(optimizer.param_groups):
            rate = as_rate(group.get("lr"))
            if rate is not None and not 0.0 <= rate < math.inf:
                self._invalid[f"group {index} of {type(optimizer).__name__}"] = rate

    def _on_scheduler(self, scheduler: LRScheduler) -> None:
        optimizer = scheduler.optimizer
        if not self.training.clock.moment.step:
            return  # a scheduler also makes a step when it is created
        if optimizer in self.training.optimizers:
            if scheduler in self._steps or len(self._steps) < MAX_SCHEDULERS:
                self._steps[scheduler] += 1
            return
        own = {*map(id, self.training.parameters.values())}
        if not own.isdisjoint(parameter_ids(optimizer)) and not getattr(optimizer, "_opt_called", False):
            self._schedulers[type(scheduler).__name__] = scheduler

    def check(self) -> Iterator[Checked]:
        count, self._count = self._count, 0
        invalid, self._invalid = self._invalid, {}
        for group, rate in invalid.items():
            yield Checked(False, rate, f"the learning rate of {group} is {rate:g}")
        in_effect = {as_rate(group.get("lr")) for each in self.training.optimizers for group in each.param_groups}
        for name, scheduler in [*self._schedulers.items()]:
            if (rate := float(scheduler.get_last_lr()[0])) not in in_effect:
                del self._schedulers[name]
                text = f"{name} changes the learning rate of an optimizer ({type(scheduler.optimizer).__name__}) without steps"
                yield Checked(False, rate, f"{text}, to {rate:.2g}")
        if count:
            yield Checked(True, count, "learning rates are finite and not negative")

    def check_end(self) -> Iterator[Checked]:
        for scheduler, count in self._steps.items():
            length, steps = _length(scheduler), self.training.clock.moment.step - self._start
            if count * FEWEST_PER_STEP < length <= steps <= LONGEST * length:
                name = type(scheduler).__name__
                text = f"{name} has {length} steps, but was stepped {count} times in {steps} training steps: it may count batches"
                yield Checked(False, count, text)
        for optimizer, largest in self._largest.items():
            if largest <= WARM and _fraction(optimizer) > largest and self.training.clock.moment.step >= FEWEST_STEPS:
                rate, configured = (float(optimizer.param_groups[0][name]) for name in ("lr", "initial_lr"))
                text = f"{type(optimizer).__name__} ends in the warm-up, with {rate:.2g} instead of {configured:.2g}"
                yield Checked(False, rate, text)


def _length(scheduler: LRScheduler) -> int:
    """Return after how many steps a scheduler ends; 0 if it does not end, or if it is unknown."""
    lengths = (getattr(scheduler, name, None) for name in ("T_max", "total_steps", "total_iters"))
    return next((int(each) for each in lengths if isinstance(each, int)), 0)


def _fraction(optimizer: Optimizer) -> float:
    """Return the largest learning rate of the groups of an optimizer as a fraction of the configured one; 1 without a schedule."""
    rates = [(as_rate(group.get("lr")), as_rate(group.get("initial_lr")) or 0.0) for group in optimizer.param_groups]
    return max(1.0 if rate is None or not 0 < configured < FACTOR else rate / configured for rate, configured in rates)
