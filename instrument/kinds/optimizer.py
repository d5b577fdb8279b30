"""Kinds around `optimizer.step`: step_post, with the parameter, its gradient, its update and the optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim import Optimizer

from .live import NO_PARAMETER_GRADIENT, NO_STATE, Clock, LiveSite


class StepHooks:
    """The step_post sites of all specs, served by one hook behind `optimizer.step`; and one in front of it, which
    keeps the parameters whose update is asked for."""

    def __init__(self, optimizer: Optimizer, lives: Sequence[LiveSite], clock: Clock) -> None:
        self.lives = lives
        self.clock = clock
        self.before: dict[LiveSite, Tensor] = {}
        self.handles = [
            optimizer.register_step_pre_hook(self.before_step),
            optimizer.register_step_post_hook(self.after_step),
        ]

    def refresh(self) -> None:
        """Nothing is kept: what is due is asked at each step."""

    def before_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002
        """Keep what the parameters are before they are updated."""
        self.before = {
            live: live.current_parameter().detach().clone()
            for live in self.lives
            if live.due and not self.clock.closed and live.site.spec.tensor_role == "update"
        }

    def after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002
        """Act on what each site asks for."""
        if self.clock.closed:
            return
        with torch.no_grad():
            for live in self.lives:
                if live.due:
                    live.called()
                    self._act(live, optimizer)
        self.before = {}

    def _act(self, live: LiveSite, optimizer: Optimizer) -> None:
        tensor = self._tensor(live, optimizer)
        if tensor is None:
            live.miss(NO_PARAMETER_GRADIENT if live.site.spec.tensor_role == "param_grad" else NO_STATE)
            return
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
