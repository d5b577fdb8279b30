"""Kinds around `optimizer.step`: step_pre and step_post.

Their tensors are the parameter, its gradient, its update, the buffers of its module and the optimizer state.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from .attached import Clock, Firing, LiveSite
from .optimizer_closure import Arguments, when_gradients_are_there
from .optimizer_owners import Owners, held_by
from .reasons import FROZEN, NO_PARAMETER_GRADIENT, NO_STATE, NO_TENSOR, NOT_OPTIMIZED, REMOVED


class StepHooks:
    """The step_pre and step_post sites of an optimizer, served by one hook before its `step` and one after it.

    The first one also copies the parameters whose update is recorded.
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
        """Do nothing: the scheduled sites are determined at each step."""

    def in_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:  # noqa: ARG002
        """The hook before the step. Sites on gradients run after the closure if there is one."""
        if self.clock.closed:
            return None
        self._act([live for live in self.pre if not _is_gradient(live)])
        with self.clock.meter or nullcontext():
            self._keep()
        return when_gradients_are_there(args, kwargs, self._on_gradients)

    def before_step(self) -> None:
        """Run the step_pre sites, then copy parameters. Call it when all gradients are complete."""
        self._act(self.pre)
        self._keep()

    def _on_gradients(self) -> None:
        self._act([live for live in self.pre if _is_gradient(live)])

    @torch.no_grad()
    def _keep(self) -> None:
        """Copy the parameters before their update into buffers that are reused at the next step.

        The copies are float32 or wider: a difference of half-precision numbers would lose most updates.
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
        """Run the step_post sites."""
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
        """Return the tensor of a site. If it does not exist, note the reason and return None."""
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
        """Remove both hooks in reverse order."""
        while self.handles:
            self.handles.pop().remove()


def _is_gradient(live: LiveSite) -> bool:
    return live.site.spec.tensor_role == "param_grad"
