"""Relation: the learning rates are numbers from 0, and schedulers change those of the optimizers that make the steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..hooks.optimizer_owners import parameter_ids
from .relation import RELATIONS, Checked, Relation, Training, as_rate

_replaced: list[tuple[Callable[..., None], Callable[..., None]]] = []  # the function before, and the one that observes
_observers: list[Callable[[LRScheduler], None]] = []


def _observed(original: Callable[..., None]) -> Callable[..., None]:
    @wraps(original)
    def step(self: LRScheduler, *args: Any, **kwargs: Any) -> None:
        for observer in [*_observers]:
            observer(self)
        original(self, *args, **kwargs)

    return step


@RELATIONS.register("rate_in_effect")
class RateInEffect(Relation):
    """Reads the learning rates at the steps of optimizers, and observes the steps of schedulers.

    A scheduler without effect changes an optimizer that holds parameters of the model, but has made no step. Schedulers with a `step`
    of their own, such as `SequentialLR`, are not observed.
    """

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._invalid: dict[str, float] = {}
        self._schedulers: dict[str, LRScheduler] = {}  # by class: those without effect
        self._count = 0

    def attach(self) -> None:
        for optimizer in self.training.optimizers:
            self.observe_steps(optimizer, self._before_step)
        _observers.append(self._on_scheduler)
        if not _replaced:
            original = LRScheduler.step
            _replaced.append((original, _observed(original)))
            LRScheduler.step = _replaced[0][1]  # type: ignore[method-assign]

    def detach(self) -> None:
        if self._on_scheduler in _observers:
            _observers.remove(self._on_scheduler)
        if (
            not _observers and _replaced and LRScheduler.step is _replaced[0][1]
        ):  # otherwise, other code has replaced it too
            LRScheduler.step = _replaced.pop()[0]  # type: ignore[method-assign]
        self._schedulers.clear()
        super().detach()

    def _before_step(self, optimizer: Optimizer) -> None:
        if self.training.is_checked:
            self._count += 1
            for index, group in enumerate(optimizer.param_groups):
                rate = as_rate(group.get("lr"))
                if rate is not None and not 0.0 <= rate < math.inf:
                    self._invalid[f"group {index} of {type(optimizer).__name__}"] = rate

    def _on_scheduler(self, scheduler: LRScheduler) -> None:
        optimizer = scheduler.optimizer
        if not self.training.is_checked or optimizer in self.training.optimizers or not self.training.clock.moment.step:
            return  # a scheduler also makes a step when it is created
        own = {*map(id, self.training.model.parameters())}
        if not own.isdisjoint(parameter_ids(optimizer)) and not getattr(optimizer, "_opt_called", False):
            self._schedulers[type(scheduler).__name__] = scheduler

    def check(self) -> Iterator[Checked]:
        count, self._count = self._count, 0
        invalid, self._invalid = self._invalid, {}
        for group, rate in invalid.items():
            yield Checked(False, rate, f"the learning rate of {group} is {rate:g}")
        for name, scheduler in self._schedulers.items():
            text = f"{name} changes the learning rate of a {type(scheduler.optimizer).__name__} that has made no step"
            yield Checked(False, float(scheduler.get_last_lr()[0]), text)
        self._schedulers.clear()
        if count:
            yield Checked(True, count, "learning rates are numbers from 0")
