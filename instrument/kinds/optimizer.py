"""Kinds around `optimizer.step`: step_pre and step_post, with the parameter, its gradient, its update, its module's
buffers and the optimizer's state."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from .causes import FROZEN, NO_PARAMETER_GRADIENT, NO_STATE, NO_TENSOR, NOT_OPTIMIZED, REMOVED
from .closure import Arguments, when_gradients_are_there
from .live import Clock, Firing, LiveSite
from .owners import Owners, held_by


class StepHooks:
    """The step_pre and step_post sites of an optimizer, served by one hook in front of its `step` and one behind it.

    The one in front also keeps the parameters whose update is asked for.
    """

    def __init__(
        self, optimizer: Optimizer, owners: Owners, lives: Sequence[LiveSite], clock: Clock, *, by_loop: bool = False
    ) -> None:
        self.optimizer = optimizer
        self.owners = owners
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

    def _on_gradients(self) -> None:
        self._act([live for live in self.pre if _is_gradient(live)])

    @torch.no_grad()
    def _keep(self) -> None:
        """Keep what the parameters are before they are updated, in memory that is used again at the next step.

        It is float32 at least: the difference of two numbers in half precision is in general none.
        """
        for live in self._due(self.post):
            if live.site.spec.tensor_role == "update":
                parameter, room = live.current_parameter(), self.before.get(live)
                if parameter is None or is_lazy(parameter):
                    continue
                wide = torch.promote_types(parameter.dtype, torch.float32)
                if room is None or (room.shape, room.dtype, room.device) != (parameter.shape, wide, parameter.device):
                    room = self.before[live] = torch.empty_like(parameter, dtype=wide)
                room.copy_(parameter)

    def after_step(self, optimizer: Optimizer, args: object, kwargs: object) -> None:  # noqa: ARG002
        """Act at step_post."""
        if not self.clock.closed:
            self._act(self.post)

    @torch.no_grad()
    def _act(self, lives: Sequence[LiveSite]) -> None:
        for live in self._due(lives):
            tensor = self._tensor(live)
            if tensor is None or not live.meet(tensor):
                continue
            live.action.prepare([tensor])
            of = live.current_parameter() if live.site.spec.tensor_role == "update" else None
            new = live.fire(tensor, live.site.own_name, Firing(live.call), value=of)
            if new is not tensor:
                tensor.copy_(new)

    def _due(self, lives: Sequence[LiveSite]) -> list[LiveSite]:
        return self.owners.sites_of(self.optimizer, [live for live in lives if live.due])

    def _tensor(self, live: LiveSite) -> Tensor | None:
        """What the site sees; None where there is nothing, and the cause is noted."""
        role, site = live.site.spec.tensor_role, live.site
        held = site.layer.module._buffers.get(site.own_name) if role == "buffer" else live.current_parameter()
        if held is not None and is_lazy(held):
            return held
        tensor = None if held is None else self._in_role(live, role, held)
        if tensor is not None:
            return tensor
        if held is None:
            live.called()
            live.miss(NO_TENSOR if role == "buffer" else REMOVED)
        elif not held.requires_grad:
            live.excuse(FROZEN)
        elif id(held) not in held_by(self.optimizer):
            live.excuse(NOT_OPTIMIZED)
        else:
            live.called()
            live.miss(NO_PARAMETER_GRADIENT if role == "param_grad" else NO_STATE)
        return None

    def _in_role(self, live: LiveSite, role: str, held: Tensor) -> Tensor | None:
        match role:
            case "buffer":
                return held
            case "param":
                return held.detach()
            case "param_grad":
                return held.grad
            case "update":
                return torch.sub(held.to(self.before[live].dtype), self.before[live], out=self.before[live])
        state = self.optimizer.state.get(held, {}).get(role.removeprefix("state."))
        return state if isinstance(state, Tensor) else None

    def detach(self) -> None:
        """Remove both hooks, the last one first."""
        while self.handles:
            self.handles.pop().remove()


def _is_gradient(live: LiveSite) -> bool:
    return live.site.spec.tensor_role == "param_grad"
