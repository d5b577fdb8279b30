"""Observation of optimizer steps: skipped steps, and the learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer

from ..errors import HookError
from ..hooks.clock import Clock
from ..hooks.hook_group import HookGroup, StepPostHooks
from ..hooks.optimizer import StepHooks, as_rate
from ..runtime.lazy_compiler import run_outside_of_graphs


class StepWatch(StepPostHooks):
    """Tracks which optimizers made a step, the learning rate that the first one used, and whether a gradient scaler skipped the step.

    Args:
        announced: Whether the loop has to call `announce` once before each optimizer step. The closure of a step may call it, also
            several times.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], scaler: GradScaler | None, clock: Clock, *, announced: bool
    ) -> None:
        super().__init__((), clock)
        self.scaler = scaler
        self._optimizers = optimizers
        self._stepped = False
        self._rate_used: Tensor | float | None = None
        self._found_inf: list[Tensor | None] = []  # one entry per optimizer step in the current training step
        self._scales = (torch.ones(()),) * 2  # after the previous training step, and after the current one
        # One tensor for all calls of `scale`; see `instrument.actions.base.Rows.set_scale`.
        self._initial_scale = torch.ones(())
        self._is_announced = announced
        self._announced: set[Optimizer] = set()
        self._stepping: set[Optimizer] = set()

    def attach(self) -> None:
        if self.scaler is not None:
            self._scales = (torch.tensor(self.scaler.get_scale()),) * 2
        for optimizer in self._optimizers:
            self.handles.append(optimizer.register_step_pre_hook(self.before_step))
            if self._is_announced:
                self.register_after_step(optimizer)

    def before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002
        if self.scaler is not None:
            # An optimizer that unscales itself receives `found_inf`, which makes it skip the step.
            self._found_inf.append(getattr(optimizer, "found_inf", None))
        self._stepped = True
        if optimizer is self._optimizers[0]:  # a scheduler may change its learning rate after the step
            rate = _rate_of(optimizer)
            self._rate_used = rate.clone() if isinstance(rate, Tensor) else rate
        if self._is_announced:
            self._stepping.add(optimizer)

    def after_step(self, optimizer: Optimizer) -> None:
        """The hook after an optimizer step that the loop has to announce."""
        if optimizer not in self._stepping:  # the end of a method that called `super().step()`, which has hooks as well
            return
        self._stepping.remove(optimizer)
        if optimizer not in self._announced:
            raise HookError(
                "optimizer.step() ran without probe.before_optimizer_step(), so its hooks did not run; with steps_by_loop=True, "
                "call it before each step"
            )
        self._announced.discard(optimizer)

    def announce(self, optimizers: Sequence[Optimizer]) -> None:
        """Record that the loop makes a step next.

        Raises:
            HookError: The step that was announced before did not follow.
        """
        if any(each in self._announced and each not in self._stepping for each in optimizers):
            raise HookError(
                "before_optimizer_step was called twice before optimizer.step(); call it once before each step"
            )
        self._announced.update(optimizers)

    def end_step(self) -> bool:
        """Return whether any optimizer made a step in the training step. Forget announced ones that a gradient scaler skipped."""
        self._announced.clear()
        stepped, self._stepped = self._stepped, False
        return stepped

    def scale(self) -> Tensor:
        """Return the scale on the device of the scaler."""
        assert self.scaler is not None, "only a gradient scaler has a scale"
        current = self.scaler._get_scale_async()  # the public get_scale waits for the device
        return self._initial_scale if current is None else current

    def take_skipped(self) -> Tensor | float | None:
        """Return whether the scaler skipped every optimizer in the last step, as 0 or 1, possibly on the device.

        None without a scaler or an optimizer.
        """
        if self.scaler is None or not self._optimizers:
            return None
        found_inf, self._found_inf = self._found_inf, []
        self._scales = (self._scales[1], self.scale().clone())
        checked = [each for each in found_inf if each is not None]
        if not found_inf or len(checked) < len(found_inf):
            return 0.0 if found_inf else 1.0
        return torch.stack([(each > 0).to(checked[0].device, torch.float32) for each in checked]).amin()

    def backed_off(self) -> bool:
        """Return whether the scaler found values in the last step that are not finite. Waits for the device, as the scaler did."""
        previous_scale, scale = self._scales
        return bool(scale < previous_scale.to(scale.device))

    def take_rate(self) -> Tensor | float | None:
        """Return the learning rate of the first optimizer's first parameter group in the last step, or of the first one that is not 0.

        None without an optimizer, or if it is no number, such as a function or one number for each parameter.

        The current value if that optimizer made no step.
        """
        if not self._optimizers:
            return None
        rate_used, self._rate_used = self._rate_used, None
        return _rate_of(self._optimizers[0]) if rate_used is None else rate_used


for _hook in (StepWatch.before_step, StepWatch.after_step):
    run_outside_of_graphs(_hook)


class WrapperWatch(HookGroup):
    """Extends the step of an optimizer to that of its wrapper, which may change parameters before it and after it.

    Args:
        wrapper: An object whose method `step` calls the step of the optimizer, such as Lookahead; or the optimizer itself, if PyTorch
            calls hooks twice because its method calls `super().step()`.
    """

    def __init__(self, wrapper: Any, optimizer: Optimizer, groups: Sequence[HookGroup], clock: Clock) -> None:
        super().__init__((), clock)
        self.wrapper, self.optimizer, self.groups = wrapper, optimizer, groups

    def attach(self) -> None:
        """Replace the method of the object, as PyTorch's schedulers do. They require a bound method."""
        optimizer, clock = self.optimizer, self.clock
        if self.wrapper is optimizer:  # the last hook before the step
            self.handles.append(optimizer.register_step_pre_hook(lambda *_: clock.begun.add(optimizer)))
        self._previous = vars(self.wrapper).get("step")

        @wraps(getattr(self.wrapper.step, "__func__", self.wrapper.step))
        def step(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
            is_copy = wrapper is not self.wrapper
            inner_step = MethodType(type(wrapper).step, wrapper) if is_copy or not self._previous else self._previous
            if is_copy or clock.closed or optimizer in clock.after_wrapper:  # closed: other code replaced it later
                return inner_step(*args, **kwargs)
            for group in self.groups:
                if isinstance(group, StepHooks) and group.optimizer is optimizer:
                    group.copy_parameters(again=False)
            clock.after_wrapper[optimizer] = None
            try:
                result = inner_step(*args, **kwargs)
            finally:
                act = clock.after_wrapper.pop(optimizer)
                clock.begun.discard(optimizer)
            if act is not None:
                act()
            return result

        # Not by an assignment, which a wrapper may pass on to the optimizer.
        vars(self.wrapper)["step"] = self._step = MethodType(step, self.wrapper)

    def detach(self) -> None:
        """Restore the method, unless other code has replaced it meanwhile."""
        super().detach()
        attributes = vars(self.wrapper)
        if attributes.get("step") is self._step:
            del attributes["step"]
            if self._previous is not None:
                attributes["step"] = self._previous


def runs_hooks_twice(optimizer: Optimizer) -> bool:
    """Return whether PyTorch calls the hooks of steps for the method `step` of several base classes."""
    steps = [vars(base)["step"] for base in type(optimizer).__mro__ if "step" in vars(base)]
    return len({step.__wrapped__ for step in steps if hasattr(step, "hooked")}) > 1


def _rate_of(optimizer: Optimizer) -> Tensor | float | None:
    rates = [group.get("lr") for group in optimizer.param_groups]
    rate = next((each for each in rates if isinstance(each, Tensor) or as_rate(each) != 0), rates[0])
    if isinstance(rate, Tensor):
        return rate if rate.numel() == 1 else None
    return as_rate(rate)
