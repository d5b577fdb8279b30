"""Hooks on tensors that get their gradient whatever becomes of the tensor, and that do not outlive their step.

- A view that is written to in place, an alias among them, drops out of the graph; then its gradient is to be had
  behind it, at the tensor that it is a view of (`Behind`).
- A tensor that is no result of anything (a parameter, an input that trains) outlives the graph, and would carry the
  hooks of one step into the next (`LeafHooks`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .live import Clock

Hook = Callable[[Tensor], Tensor | None]
Geometry = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset."""


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
            behind.register(self.hook, when=self.cut_off)

    @property
    def written(self) -> bool:
        """Whether it was written to since."""
        return self.witness is not None and self.witness._version != self.version

    def here(self, gradient: Tensor | None) -> Tensor | None:
        """The tensor's own hook. PyTorch calls it with None where an operation gave several tensors, and this one is not used."""
        if gradient is None:
            return None
        self.delivered = True
        return self.hook(gradient)

    def cut_off(self) -> bool:
        """Whether the tensor's own hook is cut off from the graph, and the one behind it takes its place."""
        return self.written and not self.delivered


class Part(NamedTuple):
    """Which part of another tensor a view is."""

    whole: Geometry
    part: Geometry

    def of(self, gradient: Tensor) -> Tensor:
        """The view's part of the whole tensor's gradient."""
        return gradient if self.whole == self.part else self._laid_out(gradient).as_strided(*self.part).clone()

    def put(self, gradient: Tensor, part: Tensor) -> Tensor:
        """The whole tensor's gradient with another part for the view."""
        return part if self.whole == self.part else self._laid_out(gradient).as_strided_scatter(part, *self.part)

    def _laid_out(self, gradient: Tensor) -> Tensor:
        shape, strides, _ = self.whole
        return torch.empty_strided(shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


class Behind(NamedTuple):
    """Where in the graph the tensor comes from that another one is a view of, and which part of it the view is.

    The gradient that is had there is the view's as it was before it was written to in place.
    """

    node: Any
    output: int
    part: Part

    @classmethod
    def of(cls, view: Tensor) -> Behind | None:
        """None where there is nothing behind: the tensor is no view, or one of a leaf."""
        base = view._base
        if base is None or base.grad_fn is None or base.dtype != view.dtype:
            return None
        offset = int(view.storage_offset()) - int(base.storage_offset())
        part = (tuple(view.shape), view.stride(), offset)
        return cls(base.grad_fn, base.output_nr, Part((tuple(base.shape), base.stride(), 0), part))

    def register(self, hook: Hook, when: Callable[[], bool]) -> None:
        """Let the hook have the view's part of the gradient that arrives there, and change it, where it is time."""
        _, output, part = self

        def before_node(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
            gradient = gradients[output]
            if gradient is None or not when() or (new := hook(part.of(gradient))) is None:
                return None
            return (*gradients[:output], part.put(gradient, new), *gradients[output + 1 :])

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
