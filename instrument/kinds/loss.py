"""Hooks on the loss. The loop passes the loss to the probe, since PyTorch has no hook for it."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .attached import Clock, Firing, LiveSite, fire_all


class LossHooks:
    """The loss sites of all specs."""

    def __init__(self, lives: Sequence[LiveSite], clock: Clock) -> None:
        self.lives = lives
        self.clock = clock
        self.due: list[LiveSite] = []
        self.turn = -1
        self.calls = 0

    def refresh(self) -> None:
        """Select the scheduled sites."""
        self.due = [live for live in self.lives if live.due]

    def see(self, loss: Tensor) -> Tensor:
        """Run the hooks on a loss. Return the loss to call `backward` on."""
        if self.clock.closed:
            return loss
        if self.turn != self.clock.turn:
            self.turn, self.calls = self.clock.turn, 0
        self.calls += 1
        for live in self.lives:
            if not live.due:
                live.not_due()
        firing = [live for live in self.due if live.meet(loss)]
        return fire_all(firing, loss, "", Firing(self.calls - 1))

    def detach(self) -> None:
        """Do nothing: no PyTorch hook was registered."""
