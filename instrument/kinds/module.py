"""Kinds on a module's tensors: forward_pre, forward, full_backward_pre, full_backward, tensor.

One pre hook and one hook on the module serve all sites, so that several specs run in the order of the configuration.
Gradients come from hooks on the tensors (`instrument.kinds.tensor`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from ..compiler import outside_graphs
from ..nested import map_leaves
from ..stats.vector import unreadable
from .attached import Clock, Firing, LiveSite, Uncopied, fire_all
from .calls import Call, Calls
from .reasons import NO_TENSOR, TRANSFORMED
from .tensor import InputGradients, OutputGradients

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


_UNMEASURED = nullcontext()


class ModuleHooks(Uncopied):
    """All sites at one module, served by two hooks that stay registered for the complete run.

    If no site is scheduled, each hook only tests a flag.
    """

    def __init__(
        self,
        module: nn.Module,
        lives: Sequence[LiveSite],
        clock: Clock,
        *,
        prepend: bool = False,
        always_call: bool = False,
    ) -> None:
        self.lives = lives
        self.clock = clock
        self.active = False
        self.calls = Calls(clock)
        for live in lives:
            live.module_calls = self.calls
        # Sites that are not scheduled; empty after the next call of the module.
        self.idle: list[LiveSite] = []
        self.pre: list[LiveSite] = []
        self.seen_input: list[LiveSite] = []
        self.output: list[LiveSite] = []
        self.input_gradients = InputGradients(clock)
        self.output_gradients = OutputGradients(clock)
        self.handles: list[RemovableHandle] = [
            module.register_forward_pre_hook(self._bound(ModuleHooks.before), prepend=prepend, with_kwargs=True),
            module.register_forward_hook(
                self._bound(ModuleHooks.after), prepend=prepend, with_kwargs=True, always_call=always_call
            ),
        ]

    def _bound(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of this object that torch.compile does not trace.

        A copied model gets that of the copied object.
        """
        return MethodType(outside_graphs(hook), self)

    def refresh(self) -> None:
        """Sort the scheduled sites by where they act."""
        due = [live for live in self.lives if live.due]
        places = [(live.site.spec.kind, live.site.spec.tensor_role, live) for live in due]
        self.active = bool(due)
        self.idle = [live for live in self.lives if not live.due]
        self.pre = [live for kind, _, live in places if kind == "forward_pre"]
        self.seen_input = [live for kind, role, live in places if kind == "forward" and role == "input"]
        self.output = [live for kind, role, live in places if kind == "forward" and role == "output"]
        # The sites that can change an incoming gradient come before those of full_backward, which record it.
        first = [
            live
            for kind, role, live in places
            if kind == "full_backward_pre" or (kind == "tensor" and role == "output")
        ]
        then = [live for kind, role, live in places if kind == "full_backward" and role == "grad_output"]
        self.output_gradients.lives = first + then
        self.input_gradients.own = [
            live for kind, role, live in places if kind == "full_backward" and role == "grad_input"
        ]
        self.input_gradients.total = [live for kind, role, live in places if kind == "tensor" and role == "input"]

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """The forward pre hook: runs the hooks on inputs and registers hooks for their gradients."""
        if self.clock.closed:
            return None
        if self.idle:
            for live in self.idle:
                live.not_due()
            self.idle = []
        if not self.active:
            return None
        with self.clock.meter or _UNMEASURED:
            return self._before(module, args, kwargs)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if _is_transformed():
            for live in self.lives:
                if live.due:
                    live.called()
                    live.miss(TRANSFORMED)
            return None
        call = self.calls.enter()
        given = new = _join(args, kwargs)
        if self.pre:
            new = self._act(self.pre, new, call)
        if self.input_gradients.wanted:
            new = self.input_gradients.bespeak(module, new, call)
        if self.output_gradients.lives:
            self.output_gradients.note_inputs(new, call)
        return None if new is given else _part(new, len(args))

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """The forward hook: runs the hooks on outputs and registers hooks for their gradients."""
        if self.clock.closed or not self.active or _is_transformed():
            return None
        with self.clock.meter or _UNMEASURED:
            return self._after(module, args, kwargs, output)

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if (call := self.calls.leave()) is None:
            return None
        if call.given is not None:
            call.given.done(output)
        if self.seen_input:
            self._act(self.seen_input, _join(args, kwargs), call)
        new = self._act(self.output, output, call) if self.output else output
        if self.output_gradients.lives:
            new = self.output_gradients.bespeak(module, new, call)
        return None if new is output else new

    def _act(self, lives: list[LiveSite], value: Any, call: Call) -> Any:
        """Run hooks on every tensor of a value. A recomputed pass writes no rows a second time."""
        acting = [live for live in lives if not (call.again and live.records)]
        fired: set[LiveSite] = set()
        obstacles: dict[LiveSite, str] = {}

        def act(path: str, tensor: Tensor) -> Tensor:
            mine = [live for live in acting if live.takes(tensor, path)]
            if mine and (cause := unreadable(tensor)) is not None:
                obstacles.update(dict.fromkeys(mine, cause))
                return tensor
            fired.update(mine)
            return fire_all(mine, tensor, path, Firing(call.number, recompute=call.again))

        new = map_leaves(value, act)
        if not call.again:
            for live in lives:
                live.called()
                live.hit() if live in fired else live.miss(obstacles.get(live, NO_TENSOR))
        return new

    def detach(self) -> None:
        """Remove both hooks in reverse order, and the hooks on tensors that outlive the graph."""
        while self.handles:
            self.handles.pop().remove()
        self.input_gradients.on_leaves.release()
        self.output_gradients.on_leaves.release()


def _is_transformed() -> bool:
    """Return whether this code runs inside a transform of torch.func."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def _join(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Combine positional and keyword arguments. Their paths are `0`, `1`, ..., and the names."""
    return {**{str(i): value for i, value in enumerate(args)}, **kwargs}


def _part(joined: dict[str, Any], positional: int) -> Arguments:
    values = list(joined.items())
    return tuple(value for _, value in values[:positional]), dict(values[positional:])
