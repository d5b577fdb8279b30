"""Gradient hooks on tensors that also fire after in-place changes, and that do not outlive their step.

- An in-place operation on a view, for example on an alias, removes the view from the graph. Its gradient is then
  available at the tensor of which it is a view (`Behind`).
- A leaf tensor (a parameter, or an input that requires a gradient) outlives the graph. Without `LeafHooks`, it would
  carry the hooks of one step into the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .attached import Clock

Hook = Callable[[Tensor], Tensor | None]
Geometry = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset."""


class Awaited:
    """A gradient hook on a tensor. For a view, also one on its base, in case the view is modified in place."""

    def __init__(self, tensor: Tensor, hook: Hook) -> None:
        self.hook = hook
        self.behind = Behind.of(tensor)
        self.witness: Tensor | None = tensor.detach()  # shares the version counter, but not the graph
        self.version = tensor._version
        self.delivered = False
        tensor.register_hook(self.here)

    def settle(self, alone: bool = False) -> None:
        """Decide whether a hook on the base is required.

        Args:
            alone: Whether no other code can modify the tensor from now on.
        """
        behind, self.behind = self.behind, None  # it refers to the graph, and must not be kept
        if behind is None or (alone and not self.written):
            self.witness = None
        else:
            behind.register(self.hook, when=self.cut_off)

    @property
    def written(self) -> bool:
        """Whether the tensor was modified in place since the hook was registered."""
        return self.witness is not None and self.witness._version != self.version

    def here(self, gradient: Tensor | None) -> Tensor | None:
        """The hook on the tensor itself.

        The gradient is None if an operation has several outputs and this one is unused.
        """
        if gradient is None:
            return None
        self.delivered = True
        return self.hook(gradient)

    def cut_off(self) -> bool:
        """Return whether the tensor's own hook is cut off from the graph, so that the hook on the base replaces it."""
        return self.written and not self.delivered


class Part(NamedTuple):
    """The region of a base tensor that a view covers."""

    whole: Geometry
    part: Geometry

    def of(self, gradient: Tensor) -> Tensor:
        """Return the view's part of the base tensor's gradient."""
        return gradient if self.whole == self.part else self._laid_out(gradient).as_strided(*self.part).clone()

    def put(self, gradient: Tensor, part: Tensor) -> Tensor:
        """Return the base tensor's gradient with the view's part replaced."""
        return part if self.whole == self.part else self._laid_out(gradient).as_strided_scatter(part, *self.part)

    def _laid_out(self, gradient: Tensor) -> Tensor:
        shape, strides, _ = self.whole
        return torch.empty_strided(shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


class Behind(NamedTuple):
    """The position in the graph of a view's base tensor, and the region that the view covers.

    The gradient there belongs to the view before it was modified in place.
    """

    node: Any
    output: int
    part: Part

    @classmethod
    def of(cls, view: Tensor) -> Behind | None:
        """Find the base of a view. None if the tensor is no view, or a view of a leaf."""
        base = view._base
        if base is None or base.grad_fn is None or base.dtype != view.dtype:
            return None
        offset = int(view.storage_offset()) - int(base.storage_offset())
        part = (tuple(view.shape), view.stride(), offset)
        return cls(base.grad_fn, base.output_nr, Part((tuple(base.shape), base.stride(), 0), part))

    def register(self, hook: Hook, when: Callable[[], bool]) -> None:
        """Register a hook on the view's part of the gradient at the base.

        It runs and can change the gradient if `when` is true.
        """
        _, output, part = self

        def before_node(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
            gradient = gradients[output]
            if gradient is None or not when() or (new := hook(part.of(gradient))) is None:
                return None
            return (*gradients[:output], part.put(gradient, new), *gradients[output + 1 :])

        self.node.register_prehook(before_node)


class LeafHooks:
    """Gradient hooks on leaf tensors. Each is only valid in the micro-step in which it was registered."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.turn = -1
        self.spent = False
        self.handles: list[RemovableHandle] = []

    def register(self, leaf: Tensor, hook: Hook) -> None:
        """Register a hook for the next gradient. Earlier hooks, which have fired or will never fire, are removed."""
        if self.spent or self.turn != self.clock.turn:
            self.release()
        turn = self.turn = self.clock.turn

        def deliver(gradient: Tensor) -> Tensor | None:
            self.spent = True
            return hook(gradient) if turn == self.clock.turn else None

        self.handles.append(leaf.register_hook(deliver))

    def release(self) -> None:
        """Remove all hooks."""
        self.spent = False
        while self.handles:
            self.handles.pop().remove()
