"""Hooks on the loss. The loop passes the loss to the probe, since PyTorch has no hook for it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .attached_hook import AttachedHook, fire_all
from .clock import Clock, FiringIndex
from .hook_group import HookGroup


class LossHooks(HookGroup):
    """The loss sites of all specs. The loop calls `apply`."""

    def __init__(self, attached_hooks: Sequence[AttachedHook], clock: Clock) -> None:
        super().__init__(attached_hooks, clock)
        self.micro_step_index = -1
        self.calls = 0

    def apply(self, loss: Tensor) -> Tensor:
        """Run the hooks on a loss. Return the loss to call `backward` on."""
        if self.clock.closed:
            return loss
        if self.micro_step_index != self.clock.micro_step_index:
            self.micro_step_index, self.calls = self.clock.micro_step_index, 0
        self.calls += 1
        for attached in self.attached_hooks:
            if not attached.is_scheduled:
                attached.count_unscheduled()
        scheduled = (attached for attached in self.attached_hooks if attached.is_scheduled)
        firing = [attached for attached in scheduled if attached.count_and_check_readable(loss)]
        return fire_all(firing, loss, "", FiringIndex(self.calls - 1))
