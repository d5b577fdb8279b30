"""Gradient hooks on tensors that also fire after in-place changes, and that do not outlive their step.

- An in-place operation on a view, for example on an alias, removes the view from the graph. Its gradient is then
  available at the tensor of which it is a view (`ViewBase`).
- A leaf tensor (a parameter, or an input that requires a gradient) outlives the graph. Without `LeafHooks`, it would
  carry the hooks of one step into the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from .clock import Clock

Hook = Callable[[Tensor], Tensor | None]
Layout = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset."""


class TensorGradientHook:
    """A gradient hook on a tensor. For a view, also one on its base, in case the view is modified in place."""

    def __init__(self, tensor: Tensor, hook: Hook) -> None:
        self.hook = hook
        self.base = ViewBase.of(tensor)
        self.detached: Tensor | None = tensor.detach()  # shares the version counter, but not the graph
        self.version = tensor._version
        self.has_fired = False
        tensor.register_hook(self.on_gradient)

    def finish_registration(self, is_private: bool = False) -> None:
        """Decide whether a hook on the base is required.

        Args:
            is_private: Whether no other code can modify the tensor from now on.
        """
        base, self.base = self.base, None  # it refers to the graph, and must not be kept
        if base is None or (is_private and not self.is_modified):
            self.detached = None
        else:
            base.register(self.hook, when=self.is_disconnected)

    @property
    def is_modified(self) -> bool:
        """Whether the tensor was modified in place since the hook was registered."""
        return self.detached is not None and self.detached._version != self.version

    def on_gradient(self, gradient: Tensor | None) -> Tensor | None:
        """The hook on the tensor itself.

        The gradient is None if an operation has several outputs and this one is unused.
        """
        if gradient is None:
            return None
        self.has_fired = True
        return self.hook(gradient)

    def is_disconnected(self) -> bool:
        """Return whether the tensor's own hook is disconnected from the graph, so that the hook on the base replaces it."""
        return self.is_modified and not self.has_fired


class ViewRegion(NamedTuple):
    """The region of a base tensor that a view covers."""

    base_layout: Layout
    view_layout: Layout

    def extract(self, gradient: Tensor) -> Tensor:
        """Return the view's part of the base tensor's gradient."""
        return (
            gradient
            if self.base_layout == self.view_layout
            else self._with_base_layout(gradient).as_strided(*self.view_layout).clone()
        )

    def insert(self, gradient: Tensor, part: Tensor) -> Tensor:
        """Return the base tensor's gradient with the view's part replaced."""
        return (
            part
            if self.base_layout == self.view_layout
            else self._with_base_layout(gradient).as_strided_scatter(part, *self.view_layout)
        )

    def _with_base_layout(self, gradient: Tensor) -> Tensor:
        shape, strides, _ = self.base_layout
        return torch.empty_strided(shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


class ViewBase(NamedTuple):
    """The position in the graph of a view's base tensor, and the region that the view covers.

    The gradient there belongs to the view before it was modified in place.
    """

    node: Any
    output: int
    region: ViewRegion

    @classmethod
    def of(cls, view: Tensor) -> ViewBase | None:
        """Find the base of a view. None if the tensor is no view, or a view of a leaf."""
        base = view._base
        if base is None or base.grad_fn is None or base.dtype != view.dtype:
            return None
        offset = int(view.storage_offset()) - int(base.storage_offset())
        layout = (tuple(view.shape), view.stride(), offset)
        return cls(base.grad_fn, base.output_nr, ViewRegion((tuple(base.shape), base.stride(), 0), layout))

    def register(self, hook: Hook, when: Callable[[], bool]) -> None:
        """Register a hook on the view's part of the gradient at the base.

        It runs and can change the gradient if `when` is true.
        """
        _, output, region = self

        def before_node(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
            gradient = gradients[output]
            if gradient is None or not when() or (new := hook(region.extract(gradient))) is None:
                return None
            return (*gradients[:output], region.insert(gradient, new), *gradients[output + 1 :])

        self.node.register_prehook(before_node)


class LeafHooks:
    """Gradient hooks on leaf tensors. Each is only valid in the micro-step in which it was registered."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.micro_step_index = -1
        self.has_fired = False
        self.handles: list[RemovableHandle] = []

    def register(self, leaf: Tensor, hook: Hook) -> None:
        """Register a hook for the next gradient. Earlier hooks, which have fired or will never fire, are removed."""
        if self.has_fired or self.micro_step_index != self.clock.micro_step_index:
            self.release()
        micro_step_index = self.micro_step_index = self.clock.micro_step_index

        def on_gradient(gradient: Tensor) -> Tensor | None:
            self.has_fired = True
            return hook(gradient) if micro_step_index == self.clock.micro_step_index else None

        self.handles.append(leaf.register_hook(on_gradient))

    def release(self) -> None:
        """Remove all hooks."""
        self.has_fired = False
        while self.handles:
            self.handles.pop().remove()
