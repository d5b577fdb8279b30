"""Kinds that see a parameter's gradient: post_accumulate_grad as it is summed, parameter_grad when it is used."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .live import NO_PARAMETER_GRADIENT, Clock, LiveSite, fire_all


class AccumulationHooks:
    """The post_accumulate_grad sites at one parameter."""

    def __init__(self, parameter: Parameter, lives: Sequence[LiveSite], clock: Clock) -> None:
        self.lives = lives
        self.clock = clock
        self.due: list[LiveSite] = []
        self.handle: RemovableHandle | None = None
        if parameter.requires_grad:
            self.handle = parameter.register_post_accumulate_grad_hook(self.accumulated)

    def refresh(self) -> None:
        """Keep the sites that are due."""
        self.due = [live for live in self.lives if live.due]

    def accumulated(self, parameter: Tensor) -> None:
        """PyTorch's hook: a micro-batch's gradient has been added to `parameter.grad`."""
        if not self.due or self.clock.closed or parameter.grad is None:
            return
        for live in self.due:
            live.called()
            live.hit()
        gradient = parameter.grad
        new = fire_all(self.due, gradient, self.due[0].site.own_name, 0, False, parameter)
        if new is not gradient:
            _deliver(gradient, new)

    def detach(self) -> None:
        """Remove the hook."""
        if self.handle is not None:
            self.handle.remove()


class BoundaryHooks:
    """The parameter_grad sites of all specs, served by one hook in front of `optimizer.step`."""

    def __init__(self, optimizer: Optimizer, lives: Sequence[LiveSite], clock: Clock) -> None:
        self.clock = clock
        self.by_spec: dict[str, list[LiveSite]] = {}
        for live in lives:
            self.by_spec.setdefault(live.site.spec.name, []).append(live)
        self.handle = optimizer.register_step_pre_hook(self.before_step)

    def refresh(self) -> None:
        """Nothing is kept: what is due is asked at each step."""

    def before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002
        """Spec by spec in the order written, each seeing the gradients that the one before left."""
        if self.clock.closed:
            return
        for lives in self.by_spec.values():
            pairs = [(live, live.current_parameter()) for live in lives if live.due]
            ready = [(live, parameter, parameter.grad) for live, parameter in pairs if parameter.grad is not None]
            for live, parameter in pairs:
                if parameter.requires_grad:
                    live.called()
                    live.hit() if parameter.grad is not None else live.miss(NO_PARAMETER_GRADIENT)
            if not ready:
                continue
            with torch.no_grad():
                ready[0][0].action.prepare([gradient for _, _, gradient in ready])
                for live, parameter, gradient in ready:
                    new = live.fire(gradient, live.site.own_name, value=parameter)
                    if new is not gradient:
                        _deliver(gradient, new)

    def detach(self) -> None:
        """Remove the hook."""
        self.handle.remove()


def _deliver(gradient: Tensor, new: Tensor) -> None:
    """Put a changed gradient where the optimizer, and a DDP bucket that it may be a view of, will find it."""
    with torch.no_grad():
        gradient.copy_(new)
