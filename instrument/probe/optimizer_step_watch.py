"""Observation of optimizer steps: skipped steps, and the learning rate."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ..errors import HookError


class _OptimizerWatch(ABC):
    """A hook before the steps of several optimizers."""

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        self._optimizers = optimizers
        self._handles: list[RemovableHandle] = []

    def attach(self) -> None:
        """Register the hooks. After an exception, `detach` removes those that were registered."""
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_pre_hook(self.before_step))

    @abstractmethod
    def before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        """The hook before an optimizer step."""

    def detach(self) -> None:
        """Remove the hooks in reverse order."""
        while self._handles:
            self._handles.pop().remove()


class ScalerWatch(_OptimizerWatch):
    """Tracks the scale of a gradient scaler, and whether it skipped optimizer steps."""

    def __init__(self, scaler: GradScaler, optimizers: Sequence[Optimizer]) -> None:
        super().__init__(optimizers)
        self.scaler = scaler
        self._initial_scale = torch.ones(
            ()
        )  # one tensor for all calls of `scale`; see `instrument.actions.base.Rows.set_scale`
        self.found_inf: list[Tensor | None] = []  # one entry per optimizer step in the current training step
        # After the previous training step, and after the current one.
        self.scales = (torch.tensor(scaler.get_scale()),) * 2

    def scale(self) -> Tensor:
        """Return the scale on the device of the scaler."""
        current = self.scaler._get_scale_async()  # the public get_scale waits for the device
        return self._initial_scale if current is None else current

    def before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002
        """The hook before an optimizer step.

        An optimizer that unscales itself receives `found_inf`, which makes it skip the step.
        """
        self.found_inf.append(getattr(optimizer, "found_inf", None))

    def take(self) -> Tensor | float:
        """Return whether the scaler skipped every optimizer in the last step, as 0 or 1, possibly on the device."""
        found_inf, self.found_inf = self.found_inf, []
        self.scales = (self.scales[1], self.scale().clone())
        checked = [each for each in found_inf if each is not None]
        if not found_inf or len(checked) < len(found_inf):
            return 0.0 if found_inf else 1.0
        return torch.stack([(each > 0).to(checked[0].device, torch.float32) for each in checked]).amin()

    def backed_off(self) -> bool:
        """Return whether the scaler found values that are not finite in the last step.

        This waits for the device, as the scaler did to decide on the step.
        """
        previous_scale, scale = self.scales
        return bool(scale < previous_scale.to(scale.device))


class StepWatch(_OptimizerWatch):
    """Tracks whether an optimizer made a step, and the learning rate that the first one used.

    A scheduler may have changed the learning rate since then.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        super().__init__(optimizers)
        self.first = optimizers[0]
        self.stepped = False
        self.rate_used: Tensor | float | None = None

    def before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002
        """The hook before an optimizer step."""
        self.stepped = True
        if optimizer is self.first:
            rate = optimizer.param_groups[0]["lr"]
            self.rate_used = rate.clone() if isinstance(rate, Tensor) else rate

    def take_stepped(self) -> bool:
        """Return whether any optimizer made a step in the last training step."""
        stepped, self.stepped = self.stepped, False
        return stepped

    def take_rate(self) -> Tensor | float:
        """Return the learning rate of the first optimizer's first parameter group in the last step.

        The current value if that optimizer made no step.
        """
        rate_used, self.rate_used = self.rate_used, None
        return self.first.param_groups[0]["lr"] if rate_used is None else rate_used


class AnnouncedSteps(_OptimizerWatch):
    """Checks that a loop calls `before_optimizer_step` once before each optimizer step.

    The closure of a step may call it, also several times.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        super().__init__(optimizers)
        self._announced: set[Optimizer] = set()
        self._stepping: set[Optimizer] = set()

    def attach(self) -> None:
        """Register a hook before and after the steps."""
        super().attach()
        for optimizer in self._optimizers:
            self._handles.append(optimizer.register_step_post_hook(self.after_step))

    def before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002
        """The hook before an optimizer step."""
        self._stepping.add(optimizer)

    def after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002
        """The hook after an optimizer step."""
        self._stepping.discard(optimizer)
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

    def end_step(self) -> None:
        """Forget steps that did not follow, because a gradient scaler skipped them."""
        self._announced.clear()
