"""Kinds around `optimizer.step`: step_pre and step_post, with the parameter, its gradient, its update, its module's
buffers and the optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .causes import NO_PARAMETER_GRADIENT, NO_STATE
from .closure import Arguments, when_gradients_are_there
from .live import Clock, Firing, LiveSite


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
            self.handles.append(optimizer.register_step_pre_hook(self.in_step))

    def refresh(self) -> None:
        """Nothing is kept: what is due is asked at each step."""

    def in_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:  # noqa: ARG002
        """PyTorch's hook in front of the step: act on what is there, and on gradients when they are."""
        if self.clock.closed:
            return None
        self._act([live for live in self.pre if not _is_gradient(live)])
        with self.clock.meter or nullcontext():
            self._keep()
        return when_gradients_are_there(args, kwargs, self._on_gradients)

    def before_step(self) -> None:
        """All is there, and the optimizer is about to use it: act at step_pre, then keep what is to be updated."""
        self._act(self.pre)
        self._keep()

    def _on_gradients(self, call: int) -> None:
        self._act([live for live in self.pre if _is_gradient(live)], call)

    @torch.no_grad()
    def _keep(self) -> None:
        """Keep what the parameters are before they are updated, in memory that is used again at the next step."""
        for live in self.post:
            if live.due and live.site.spec.tensor_role == "update":
                parameter, room = live.current_parameter(), self.before.get(live)
                if room is None or (room.shape, room.dtype, room.device) != _kind_of(parameter):
                    room = self.before[live] = torch.empty_like(parameter)
                room.copy_(parameter)

    def after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002
        """Act at step_post."""
        if not self.clock.closed:
            self._act(self.post)

    @torch.no_grad()
    def _act(self, lives: Sequence[LiveSite], call: int = 0) -> None:
        for live in lives:
            if not live.due:
                continue
            live.called()
            tensor = self._tensor(live)
            if tensor is None:
                live.miss(NO_PARAMETER_GRADIENT if live.site.spec.tensor_role == "param_grad" else NO_STATE)
                continue
            live.hit()
            live.action.prepare([tensor])
            of = live.current_parameter() if live.site.spec.tensor_role == "update" else None
            new = live.fire(tensor, live.site.own_name, Firing(call), value=of)
            if new is not tensor:
                tensor.copy_(new)

    def _tensor(self, live: LiveSite) -> Tensor | None:
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
                return torch.sub(parameter, self.before[live], out=self.before[live])
        state = self.optimizer.state.get(parameter, {}).get(role.removeprefix("state."))
        return state if isinstance(state, Tensor) else None

    def detach(self) -> None:
        """Remove both hooks, the last one first."""
        while self.handles:
            self.handles.pop().remove()


def _kind_of(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _is_gradient(live: LiveSite) -> bool:
    return live.site.spec.tensor_role == "param_grad"
