"""Kinds on a parameter's gradient: parameter_grad_micro, post_accumulate_grad and parameter_grad.

They see the gradient of a micro-batch, the accumulated gradient, and the gradient before the optimizer step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from .attached import Clock, Firing, LiveSite, fire_all, unscaled
from .optimizer_closure import Arguments, when_gradients_are_there
from .optimizer_owners import Owners, held_by
from .reasons import FROZEN, NO_PARAMETER_GRADIENT, NOT_OPTIMIZED, REMOVED


class GradientHooks:
    """The parameter_grad_micro and post_accumulate_grad sites at one parameter.

    The hooks are also registered on frozen parameters and on lazy ones without values, and fire from the first gradient
    on. They are lost if the parameter is replaced (`load_state_dict(assign=True)`, a new `nn.Parameter`). `renew`
    detects this and registers them on the new one.
    """

    def __init__(self, lives: Sequence[LiveSite], clock: Clock) -> None:
        self.clock = clock
        self.lives = lives
        self.micro = [live for live in lives if live.site.spec.kind == "parameter_grad_micro"]
        self.sums = [live for live in lives if live.site.spec.kind == "post_accumulate_grad"]
        self.site = lives[0]
        self.handles: list[RemovableHandle] = []
        self.turn = -1
        self.passes: Counter[str] = Counter()
        self.parameter: Parameter | None = None
        self.renew()

    def renew(self) -> bool:
        """Register the hooks on the current parameter if it is a different object.

        Between two steps, this also notes whether the parameter is trained.

        Returns:
            Whether it replaced another parameter.
        """
        parameter = self.site.current_parameter()
        for live in self.lives:
            live.trained = parameter is not None and parameter.requires_grad
        if parameter is self.parameter:
            return False
        self.detach()
        is_new, self.parameter = self.parameter is not None, parameter
        if parameter is None:
            return False
        if _can_train(parameter):
            with _as_trained(parameter):
                if self.micro:
                    self.handles.append(parameter.register_hook(self.arrived))
                if self.sums:
                    self.handles.append(parameter.register_post_accumulate_grad_hook(self.accumulated))
        return is_new

    def refresh(self) -> None:
        """Do nothing: the scheduled sites are determined at each gradient."""

    def arrived(self, gradient: Tensor) -> Tensor | None:
        """The hook of `Tensor.register_hook`: the gradient of one micro-batch, before accumulation."""
        due = self._due(self.micro, gradient)
        new = fire_all(due, gradient, self.site.site.own_name, self._passes("micro"), self.parameter)
        return None if new is gradient else new

    def accumulated(self, parameter: Tensor) -> None:
        """The hook of `register_post_accumulate_grad_hook`: `parameter.grad` contains the micro-batch's gradient."""
        if parameter.grad is None:
            return
        gradient = parameter.grad
        due = self._due(self.sums, gradient)
        new = fire_all(due, gradient, self.site.site.own_name, self._passes("sums"), parameter)
        if new is not gradient:
            _deliver(gradient, new)

    def _passes(self, kind: str) -> Firing:
        """Count a gradient of the parameter. A micro-step has several if backward is called several times."""
        if self.turn != self.clock.turn:
            self.turn = self.clock.turn
            self.passes.clear()
        self.passes[kind] += 1
        return Firing(backward=self.passes[kind] - 1)

    def _due(self, lives: Sequence[LiveSite], gradient: Tensor) -> list[LiveSite]:
        return [live for live in lives if live.due and not self.clock.closed and live.meet(gradient)]

    def detach(self) -> None:
        """Remove the hooks in reverse order."""
        while self.handles:
            self.handles.pop().remove()


class BoundaryHooks:
    """The parameter_grad sites of all specs at an optimizer's parameters, served by one hook before its `step`.

    If the step has a closure (LBFGS), the sites run after each call of the closure, which computes the gradients. A
    loop whose closure does more, and that announces complete gradients itself (Lightning), has no hook on its optimizer
    (`by_loop`).
    """

    def __init__(
        self, optimizer: Optimizer, owners: Owners, lives: Sequence[LiveSite], clock: Clock, *, by_loop: bool = False
    ) -> None:
        self.optimizer = optimizer
        self.owners = owners
        self.clock = clock
        self.by_spec: dict[str, list[LiveSite]] = {}
        for live in lives:
            self.by_spec.setdefault(live.site.spec.name, []).append(live)
        self.handle = None if by_loop else optimizer.register_step_pre_hook(self.in_step)

    def refresh(self) -> None:
        """Do nothing: the scheduled sites are determined at each step."""

    def in_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:  # noqa: ARG002
        """The hook before the step."""
        return when_gradients_are_there(args, kwargs, self.before_step)

    def before_step(self) -> None:
        """Run the specs in the order of the configuration. Each sees the gradients that the previous one returned."""
        if self.clock.closed:
            return
        held = held_by(self.optimizer)  # parameters may be added or removed during the loop
        for lives in self.by_spec.values():
            due = self.owners.sites_of(self.optimizer, [live for live in lives if live.due])
            if ready := [found for live in due if (found := _ready(live, held)) is not None]:
                # A fused optimizer unscales gradients itself and provides the factor.
                self._act(ready, getattr(self.optimizer, "grad_scale", None))

    @torch.no_grad()
    def _act(self, ready: list[tuple[LiveSite, Parameter, Tensor]], scale: Tensor | None) -> None:
        gradients = [gradient for _, _, gradient in ready]
        true = gradients if scale is None else [unscaled(gradient, scale) for gradient in gradients]
        ready[0][0].action.prepare(true)
        changed = [
            live.fire(old, live.site.own_name, Firing(live.call), value=p, amp_scale=scale) for live, p, old in ready
        ]
        # Replace gradients only after all actions have succeeded.
        for gradient, new in zip(gradients, changed, strict=True):
            if new is not gradient:
                _deliver(gradient, new)

    def detach(self) -> None:
        """Remove the hook."""
        if self.handle is not None:
            self.handle.remove()


def _ready(live: LiveSite, held: Set[int]) -> tuple[LiveSite, Parameter, Tensor] | None:
    """Return a site with its parameter and gradient. If it cannot fire, note the reason and return None."""
    parameter = live.current_parameter()
    if parameter is None:
        live.called()
        live.miss(REMOVED)
        return None
    if id(parameter) in held and parameter.grad is not None:
        return (live, parameter, parameter.grad) if live.meet(parameter.grad) else None
    if not parameter.requires_grad:
        live.excuse(FROZEN)
    elif id(parameter) not in held:
        live.excuse(NOT_OPTIMIZED)
    else:
        live.called()
        live.miss(NO_PARAMETER_GRADIENT)
    return None


def _can_train(parameter: Parameter) -> bool:
    """Return whether a parameter can get a gradient.

    Integers and frozen parameters of torch.inference_mode() cannot.
    """
    if parameter.requires_grad or is_lazy(parameter):
        return True
    return not parameter.is_inference() and (parameter.is_floating_point() or parameter.is_complex())


@contextmanager
def _as_trained(parameter: Parameter) -> Iterator[None]:
    """Allow registering hooks on the parameter.

    PyTorch refuses them on frozen and lazy parameters, but keeps existing ones.
    """
    frozen = not parameter.requires_grad
    with torch._C.DisableTorchFunctionSubclass() if is_lazy(parameter) else nullcontext():
        if frozen:
            parameter.requires_grad_(True)
        try:
            yield
        finally:
            if frozen:
                parameter.requires_grad_(False)


def _deliver(gradient: Tensor, new: Tensor) -> None:
    """Write a changed gradient into the existing tensor, which the optimizer uses and a DDP bucket may contain."""
    with torch.no_grad():
        gradient.copy_(new)
