"""Kinds that see a parameter's gradient: parameter_grad_micro as it arrives, post_accumulate_grad as it is summed,
parameter_grad when it is used."""

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

from .causes import FROZEN, NO_PARAMETER_GRADIENT, NOT_OPTIMIZED, REMOVED
from .closure import Arguments, when_gradients_are_there
from .live import Clock, Firing, LiveSite, fire_all, unscaled
from .owners import Owners, held_by


class GradientHooks:
    """The parameter_grad_micro and post_accumulate_grad sites at one parameter.

    They are on the parameter also while it is frozen, or lazy and without values: it keeps them, and they fire from its
    first gradient on. Hooks are lost where a parameter is put in the place of another (`load_state_dict(assign=True)`, a
    new `nn.Parameter`): `renew` finds that out, and puts them on the new one.
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
        """Put the hooks on the parameter that is there now; gives whether it is another one than before.

        Called between two steps, it also notes whether the parameter trains.
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
        """Nothing is kept: what is due is asked at each gradient."""

    def arrived(self, gradient: Tensor) -> Tensor | None:
        """`Tensor.register_hook`: a micro-batch's own gradient, before it is added to the sum."""
        due = self._due(self.micro, gradient)
        new = fire_all(due, gradient, self.site.site.own_name, self._passes("micro"), self.parameter)
        return None if new is gradient else new

    def accumulated(self, parameter: Tensor) -> None:
        """PyTorch's hook: a micro-batch's gradient has been added to `parameter.grad`."""
        if parameter.grad is None:
            return
        gradient = parameter.grad
        due = self._due(self.sums, gradient)
        new = fire_all(due, gradient, self.site.site.own_name, self._passes("sums"), parameter)
        if new is not gradient:
            _deliver(gradient, new)

    def _passes(self, kind: str) -> Firing:
        """Count a gradient of the parameter: there are several in a turn where backward is called several times."""
        if self.turn != self.clock.turn:
            self.turn = self.clock.turn
            self.passes.clear()
        self.passes[kind] += 1
        return Firing(backward=self.passes[kind] - 1)

    def _due(self, lives: Sequence[LiveSite], gradient: Tensor) -> list[LiveSite]:
        return [live for live in lives if live.due and not self.clock.closed and live.meet(gradient)]

    def detach(self) -> None:
        """Remove the hooks, the last one first."""
        while self.handles:
            self.handles.pop().remove()


class BoundaryHooks:
    """The parameter_grad sites of all specs at an optimizer's parameters, served by one hook in front of its `step`.

    Where the optimizer is given a closure (LBFGS), the gradients that it uses are those that the closure leaves: then
    the sites act behind it, each time that the optimizer calls it. A loop that does more in its closure, and says
    itself when the gradients are there (Lightning), has no hook on its optimizer (`by_loop`).
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
        """Nothing is kept: what is due is asked at each step."""

    def in_step(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:  # noqa: ARG002
        """PyTorch's hook in front of the step."""
        return when_gradients_are_there(args, kwargs, self.before_step)

    def before_step(self) -> None:
        """Spec by spec in the order written, each seeing the gradients that the one before left."""
        if self.clock.closed:
            return
        held = held_by(self.optimizer)  # parameters are added to it, and taken away, while the loop runs
        for lives in self.by_spec.values():
            due = self.owners.sites_of(self.optimizer, [live for live in lives if live.due])
            if ready := [found for live in due if (found := _ready(live, held)) is not None]:
                # An optimizer that unscales by itself (fused) is given scaled gradients, and says by what.
                self._act(ready, getattr(self.optimizer, "grad_scale", None))

    @torch.no_grad()
    def _act(self, ready: list[tuple[LiveSite, Parameter, Tensor]], scale: Tensor | None) -> None:
        gradients = [gradient for _, _, gradient in ready]
        true = gradients if scale is None else [unscaled(gradient, scale) for gradient in gradients]
        ready[0][0].action.prepare(true)
        changed = [
            live.fire(old, live.site.own_name, Firing(live.call), value=p, amp_scale=scale) for live, p, old in ready
        ]
        for gradient, new in zip(gradients, changed, strict=True):  # all of them, or none where a function fails
            if new is not gradient:
                _deliver(gradient, new)

    def detach(self) -> None:
        """Remove the hook."""
        if self.handle is not None:
            self.handle.remove()


def _ready(live: LiveSite, held: Set[int]) -> tuple[LiveSite, Parameter, Tensor] | None:
    """A site with the gradient that the optimizer is about to use; None where it cannot fire, and the cause is noted."""
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
    """Whether a parameter could ever get a gradient: an integer could not, nor a frozen one of torch.inference_mode()."""
    if parameter.requires_grad or is_lazy(parameter):
        return True
    return not parameter.is_inference() and (parameter.is_floating_point() or parameter.is_complex())


@contextmanager
def _as_trained(parameter: Parameter) -> Iterator[None]:
    """Inside, the parameter takes hooks: PyTorch refuses them on a frozen one and on a lazy one, but both keep them."""
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
    """Put a changed gradient where the optimizer, and a DDP bucket that it may be a view of, will find it."""
    with torch.no_grad():
        gradient.copy_(new)
