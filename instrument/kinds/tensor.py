"""Gradients of a module's inputs and outputs, by hooks on the tensors.

They give the values that PyTorch's module hooks give, to the bit, and unlike those they survive operations in place
on the module's input or output. Two things have to be done with care:

- A tensor that several modules take has one gradient, the sum. `grad_input` is the share of one module, so the
  module is handed an alias of its own. An alias that is written to in place drops out of the graph; then the
  gradient is to be had at the tensor behind it.
- The same holds for an output that is the input itself (`nn.Identity`, dropout in eval).

No hook holds a tensor that belongs to a graph: the graph holds the hook, and neither would ever be freed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..nested import leaves, map_leaves
from .live import NO_GRAPH, NO_INPUT_GRAPH, NO_TENSOR, Clock, LiveSite, fire_all


class GradientCall:
    """The gradients of one call of a module, at one end of it, while they are awaited."""

    def __init__(self, lives: Sequence[LiveSite], call: int, recompute: bool, clock: Clock) -> None:
        self.lives = lives
        self.call = call
        self.recompute = recompute
        self.clock = clock
        self.fired: set[LiveSite] = set()

    def hook(self, path: str, value: Tensor) -> Callable[[Tensor], Tensor | None]:
        """What is to be registered on a tensor; `value` is what the gradient will be the gradient of."""
        lives = [live for live in self.lives if live.wants(path)]
        kept = value.detach().clone() if any(live.needs_value for live in lives) else None

        def deliver(gradient: Tensor) -> Tensor | None:
            if self.clock.closed:
                return None
            for live in lives:
                if live not in self.fired:
                    self.fired.add(live)
                    live.hit()
            new = fire_all(lives, gradient, path, self.call, self.recompute, kept)
            return None if new is gradient else new

        return deliver

    def bespoken(self, seen: bool, awaited: set[str], *, at_input: bool = False) -> None:
        """All tensors of the call have been gone through: settle which sites can still fire."""
        for live in self.lives:
            if self.recompute:
                continue
            if any(live.wants(path) for path in awaited):
                live.called()
            elif at_input and seen and live.records and torch.is_grad_enabled():
                live.excuse(NO_INPUT_GRAPH)
            else:
                live.called()
                live.miss(NO_GRAPH if seen else NO_TENSOR)


class InputGradients:
    """The gradients of what goes into a module: its own share (`full_backward`), or in total (`tensor`)."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.own: list[LiveSite] = []
        self.total: list[LiveSite] = []
        self.aliases: list[Alias] = []

    @property
    def wanted(self) -> bool:
        """Whether any site awaits such a gradient."""
        return bool(self.own or self.total)

    def bespeak(self, module: nn.Module, value: Any, call: int, recompute: bool) -> Any:
        """Register for every tensor of the input; gives the input that the module is to be called with."""
        own = GradientCall(self.own, call, recompute, self.clock)
        total = GradientCall(self.total, call, recompute, self.clock)
        in_place = getattr(module, "inplace", False) is True
        seen, awaited = False, set()
        self.aliases = []

        def register(path: str, tensor: Tensor) -> Tensor:
            nonlocal seen
            seen = True
            if not (tensor.requires_grad and torch.is_grad_enabled()):
                return tensor
            awaited.add(path)
            if any(live.wants(path) for live in self.total):
                tensor.register_hook(total.hook(path, tensor))
            if not any(live.wants(path) for live in self.own):
                return tensor
            hook = own.hook(path, tensor)
            if in_place:
                tensor.register_hook(hook)
                return tensor
            alias = tensor.view_as(tensor)
            alias.register_hook(hook)
            if tensor.grad_fn is not None:
                self.aliases.append(Alias(alias, alias._version, tensor.grad_fn, tensor.output_nr, hook))
            return alias

        new = map_leaves(value, register)
        own.bespoken(seen, awaited, at_input=True)
        total.bespoken(seen, awaited, at_input=True)
        return new

    def forward_done(self) -> None:
        """The module has run: where it wrote to an alias in place, await the gradient behind the alias."""
        aliases, self.aliases = self.aliases, []
        for alias in aliases:
            if alias.tensor._version != alias.version:
                alias.node.register_prehook(alias.await_behind)


class Alias(NamedTuple):
    """An alias that a module was handed, and where in the graph the tensor behind it came from."""

    tensor: Tensor
    version: int
    node: Any
    output: int
    hook: Callable[[Tensor], Tensor | None]

    @property
    def await_behind(self) -> Callable[[Sequence[Tensor | None]], tuple[Tensor | None, ...] | None]:
        """A pre-hook on the node that made the tensor; its gradient is the one with the tensor's number."""
        output, hook = self.output, self.hook

        def before_node(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
            gradient = gradients[output]
            new = None if gradient is None else hook(gradient)
            return None if new is None else (*gradients[:output], new, *gradients[output + 1 :])

        return before_node


class OutputGradients:
    """The gradients of what comes out of a module."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.lives: list[LiveSite] = []
        self.inputs: dict[int, int] = {}

    def note_inputs(self, value: Any) -> None:
        """Remember which tensors went in, and at which version, to know an output that is the input itself."""
        self.inputs = {id(tensor): tensor._version for _, tensor in leaves(value)}

    def bespeak(self, output: Any, call: int, recompute: bool) -> Any:
        """Register for every tensor of the output; gives the output that the caller is to get."""
        awaiting = GradientCall(self.lives, call, recompute, self.clock)
        inputs, self.inputs = self.inputs, {}
        seen, awaited = False, set()

        def register(path: str, tensor: Tensor) -> Tensor:
            nonlocal seen
            seen = True
            if not (tensor.requires_grad and torch.is_grad_enabled() and any(live.wants(path) for live in self.lives)):
                return tensor
            awaited.add(path)
            hook = awaiting.hook(path, tensor)
            if inputs.get(id(tensor)) == tensor._version:
                return _aliased(tensor, hook)
            tensor.register_hook(hook)
            return tensor

        new = map_leaves(output, register)
        awaiting.bespoken(seen, awaited)
        return new


def _aliased(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Tensor:
    """An alias of an output with a hook on it, and on the tensor in case the alias is written to in place later."""
    alias = tensor.view_as(tensor)
    witness = tensor.detach()  # shares the version counter, not the graph
    version = witness._version
    delivered = False

    def on_alias(gradient: Tensor) -> Tensor | None:
        nonlocal delivered
        delivered = True
        return hook(gradient)

    def behind_alias(gradient: Tensor) -> Tensor | None:
        return hook(gradient) if not delivered and witness._version != version else None

    alias.register_hook(on_alias)
    tensor.register_hook(behind_alias)
    return alias
