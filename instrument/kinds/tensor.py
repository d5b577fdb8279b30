"""Gradients of a module's inputs and outputs, by hooks on the tensors.

They give the values that PyTorch's module hooks give, to the bit, and unlike those they survive operations in place
on the module's input or output. Three things have to be done with care:

- A tensor that several modules take has one gradient, the sum. `grad_input` is the share of one module, so the
  module is handed an alias of its own. The same holds for an output that is the input itself (`nn.Identity`,
  dropout in eval) or a parameter.
- A view that is written to in place, an alias among them, drops out of the graph; then its gradient is to be had
  behind it, at the tensor that it is a view of (`Behind`).
- A tensor that is no result of anything (a parameter, an input that trains) outlives the graph, and would carry the
  hooks of one step into the next (`LeafHooks`).

No hook holds a tensor that belongs to a graph: the graph holds the hook, and neither would ever be freed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.hooks import RemovableHandle

from ..nested import leaves, map_leaves
from .live import NO_GRAPH, NO_INPUT_GRAPH, NO_TENSOR, Clock, LiveSite, fire_all

Hook = Callable[[Tensor], Tensor | None]
Geometry = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset."""


class GradientCall:
    """The gradients of one call of a module, at one end of it, while they are awaited."""

    def __init__(self, lives: Sequence[LiveSite], call: int, recompute: bool, clock: Clock) -> None:
        self.lives = lives
        self.call = call
        self.recompute = recompute
        self.clock = clock
        self.fired: set[LiveSite] = set()

    def hook(self, path: str, value: Tensor) -> Hook:
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
        self.on_leaves = LeafHooks(clock)
        self.handed: list[tuple[Tensor, Awaited]] = []

    @property
    def wanted(self) -> bool:
        """Whether any site awaits such a gradient."""
        return bool(self.own or self.total)

    def bespeak(self, module: nn.Module, value: Any, call: int, recompute: bool) -> Any:
        """Register for every tensor of the input; gives the input that the module is to be called with."""
        own = GradientCall(self.own, call, recompute, self.clock)
        total = GradientCall(self.total, call, recompute, self.clock)
        in_place = _writes_to_its_input(module)
        seen, awaited = False, set()
        self.handed = []

        def register(path: str, tensor: Tensor) -> Tensor:
            nonlocal seen
            seen = True
            if not (tensor.requires_grad and torch.is_grad_enabled()):
                return tensor
            awaited.add(path)
            if any(live.wants(path) for live in self.total):
                hook = total.hook(path, tensor)
                self.on_leaves.register(tensor, hook) if tensor.is_leaf else Awaited(tensor, hook).settle()
            if not any(live.wants(path) for live in self.own):
                return tensor
            hook = own.hook(path, tensor)
            if in_place and not tensor._is_view():  # nobody but the module sees the tensor as it is now
                tensor.register_hook(hook)
                return tensor
            alias = tensor.view_as(tensor)
            self.handed.append((alias, Awaited(alias, hook)))
            return alias

        new = map_leaves(value, register)
        own.bespoken(seen, awaited, at_input=True)
        total.bespoken(seen, awaited, at_input=True)
        return new

    def forward_done(self, output: Any) -> None:
        """The module has run: where it wrote to an alias in place, or gave it away, look behind the alias too."""
        handed, self.handed = self.handed, []
        if not handed:
            return
        given = {id(part) for _, tensor in leaves(output) for part in (tensor, tensor._base) if part is not None}
        for alias, awaited in handed:
            awaited.settle(given.isdisjoint((id(alias), id(alias._base))))

    def release(self) -> None:
        """Let go of all that outlives a graph."""
        self.handed = []
        self.on_leaves.release()


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
            if tensor.is_leaf or inputs.get(id(tensor)) == tensor._version:
                tensor = tensor.view_as(tensor)
            Awaited(tensor, hook).settle()
            return tensor

        new = map_leaves(output, register)
        awaiting.bespoken(seen, awaited)
        return new


class Awaited:
    """A hook on a tensor; of a view behind it too, in case it is written to in place."""

    def __init__(self, tensor: Tensor, hook: Hook) -> None:
        self.hook = hook
        self.behind = Behind.of(tensor)
        self.witness: Tensor | None = tensor.detach()  # shares the version counter, not the graph
        self.version = tensor._version
        self.delivered = False
        tensor.register_hook(self.here)

    def settle(self, alone: bool = False) -> None:
        """All is known about the tensor: nobody can write to it any more where its owner stands `alone`."""
        behind, self.behind = self.behind, None  # it is part of the graph
        if behind is None or (alone and not self.written):
            self.witness = None
        else:
            behind.register(self.there)

    @property
    def written(self) -> bool:
        """Whether it was written to since."""
        return self.witness is not None and self.witness._version != self.version

    def here(self, gradient: Tensor) -> Tensor | None:
        """The tensor's own hook."""
        self.delivered = True
        return self.hook(gradient)

    def there(self, gradient: Tensor) -> Tensor | None:
        """The hook behind it, for when the tensor's own is cut off."""
        return self.hook(gradient) if self.written and not self.delivered else None


class Behind(NamedTuple):
    """Where in the graph the tensor comes from that another one is a view of, and which part of it the view is.

    The gradient that is had there is the view's as it was before it was written to in place.
    """

    node: Any
    output: int
    whole: Geometry
    part: Geometry

    @classmethod
    def of(cls, view: Tensor) -> Behind | None:
        """None where there is nothing behind: the tensor is no view, or one of a leaf."""
        base = view._base
        if base is None or base.grad_fn is None or base.dtype != view.dtype:
            return None
        offset = int(view.storage_offset()) - int(base.storage_offset())
        part = (tuple(view.shape), view.stride(), offset)
        return cls(base.grad_fn, base.output_nr, (tuple(base.shape), base.stride(), 0), part)

    def register(self, hook: Hook) -> None:
        """Let the hook have the view's part of the gradient that arrives there, and change it."""
        _, output, whole, part = self

        def before_node(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
            gradient = gradients[output]
            if gradient is None:
                return None
            if whole == part:
                new = hook(gradient)
            else:
                copied = torch.empty_strided(*whole[:2], dtype=gradient.dtype, device=gradient.device).copy_(gradient)
                change = hook(copied.as_strided(*part).clone())
                new = None if change is None else copied.as_strided_scatter(change, *part)
            return None if new is None else (*gradients[:output], new, *gradients[output + 1 :])

        self.node.register_prehook(before_node)


class LeafHooks:
    """Hooks on tensors that are no result of anything; each is good for the turn that it was registered in."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.turn = -1
        self.spent = False
        self.handles: list[RemovableHandle] = []

    def register(self, leaf: Tensor, hook: Hook) -> None:
        """Await the next gradient; what was awaited before, and came or will not come any more, is let go."""
        if self.spent or self.turn != self.clock.turn:
            self.release()
        turn = self.turn = self.clock.turn

        def deliver(gradient: Tensor) -> Tensor | None:
            self.spent = True
            return hook(gradient) if turn == self.clock.turn else None

        self.handles.append(leaf.register_hook(deliver))

    def release(self) -> None:
        """Remove them all."""
        self.spent = False
        while self.handles:
            self.handles.pop().remove()


def _writes_to_its_input(module: nn.Module) -> bool:
    """Whether a module says that it works in place, and does: dropout that is off gives back what it was given."""
    is_off = isinstance(module, _DropoutNd) and not (module.training and module.p)
    return getattr(module, "inplace", False) is True and not is_off
