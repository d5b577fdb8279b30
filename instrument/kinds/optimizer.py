"""Kinds around `optimizer.step`: step_pre and step_post, with the parameter, its gradient, its update, its module's
buffers and the optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from .causes import NO_PARAMETER_GRADIENT, NO_STATE
from .live import Clock, LiveSite


class StepHooks:
    """The step_pre and step_post sites of all specs, served by one hook in front of `optimizer.step` and one behind it.

    The one in front also keeps the parameters whose update is asked for.
    """

    def __init__(self, optimizer: Optimizer, lives: Sequence[LiveSite], clock: Clock, *, by_loop: bool = False) -> None:
        self.optimizer = optimizer
        self.clock = clock
        self.pre = [live for live in lives if live.site.spec.kind == "step_pre"]
        self.post = [live for live in lives if live.site.spec.kind == "step_post"]
        self.before: dict[LiveSite, Tensor] = {}
        self.handles = [optimizer.register_step_post_hook(self.after_step)]
        if not by_loop:
            self.handles.append(optimizer.register_step_pre_hook(self.before_step))

    def refresh(self) -> None:
        """Nothing is kept: what is due is asked at each step."""

    def before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002
        """Act at step_pre, then keep what the parameters are before they are updated."""
        if self.clock.closed:
            return
        self._act(self.pre, optimizer)
        self.before = {
            live: live.current_parameter().detach().clone()
            for live in self.post
            if live.due and live.site.spec.tensor_role == "update"
        }

    def after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002
        """Act at step_post."""
        if not self.clock.closed:
            self._act(self.post, optimizer)
        self.before = {}

    @torch.no_grad()
    def _act(self, lives: Sequence[LiveSite], optimizer: Optimizer) -> None:
        for live in lives:
            if not live.due:
                continue
            live.called()
            tensor = self._tensor(live, optimizer)
            if tensor is None:
                live.miss(NO_PARAMETER_GRADIENT if live.site.spec.tensor_role == "param_grad" else NO_STATE)
                continue
            live.hit()
            live.action.prepare([tensor])
            new = live.fire(tensor, live.site.own_name)
            if new is not tensor:
                tensor.copy_(new)

    def _tensor(self, live: LiveSite, optimizer: Optimizer) -> Tensor | None:
        role = live.site.spec.tensor_role
        if role == "buffer":
            return live.site.layer.module._buffers[live.site.own_name]
        parameter = live.current_parameter()
        match role:
            case "param":
                return parameter.detach()
            case "param_grad":
                return parameter.grad
            case "update":
                return parameter.detach() - self.before[live]
        state = optimizer.state.get(parameter, {}).get(role.removeprefix("state."))
        return state if isinstance(state, Tensor) else None

    def detach(self) -> None:
        """Remove both hooks, the last one first."""
        while self.handles:
            self.handles.pop().remove()
