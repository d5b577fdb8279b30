"""Gradient hooks on tensors, which also fire after in-place changes and do not outlive their step, and the part of one module.

- An in-place operation on a view, for example on an alias, removes the view from the graph. Its gradient is then
  available at the tensor of which it is a view (`ViewBase`).
- A leaf tensor (a parameter, or an input that requires a gradient) outlives the graph. Without `LeafHooks`, it would
  carry the hooks of one step into the next.

A tensor that is used by several operations has one gradient: the sum of their contributions, in the order in which they
arrive. An alias would separate the contribution of a module, but would also change the order of the sum and its
rounding. To record without side effects, the operations of the module that use the tensor are found in the graph, and
their contributions are summed separately (`ModuleContribution`).
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from ..values.nested import iter_tensors
from .clock import Clock, graph_task, operator_name

if TYPE_CHECKING:
    from ..stats.native import OutputGradientHook

Hook = Callable[[Tensor], Tensor | None]
Layout = tuple[tuple[int, ...], tuple[int, ...], int]
"""Shape, strides and offset."""


class TensorGradientHook:
    """A gradient hook on a tensor. For a view, also one on its base, in case the view is modified in place.

    Args:
        is_active: Whether it acts from now on. Default: True. Otherwise, it acts after `finish_registration`.
    """

    def __init__(self, tensor: Tensor, hook: Hook, *, is_active: bool = True) -> None:
        self.hook = hook
        self.is_active = is_active
        self.base = ViewBase.of(tensor)
        self.detached: Tensor | None = tensor.detach()  # shares the version counter, but not the graph
        self.version = tensor._version
        self.passes: set[int] = set()  # the backward passes in which it fired
        tensor.register_hook(self.on_gradient)

    def finish_registration(self, is_private: bool = False) -> None:
        """Decide whether a hook on the base is required: not if no other code can modify the tensor from now on (`is_private`)."""
        self.is_active = True
        base, self.base = self.base, None  # it refers to the graph, and must not be kept
        if base is None or (is_private and not self.is_modified):
            self.detached = None
        else:
            _hook_node(base, self.hook, self.is_disconnected)

    @property
    def is_modified(self) -> bool:
        """Whether the tensor was modified in place since the hook was registered."""
        return self.detached is not None and self.detached._version != self.version

    def on_gradient(self, gradient: Tensor | None) -> Tensor | None:
        """The hook on the tensor itself. The gradient is None if an operation has several outputs and this one is unused."""
        if gradient is None or not self.is_active:
            return None
        self.passes.add(graph_task())
        return self.hook(gradient)

    def is_disconnected(self) -> bool:
        """Return whether this backward pass does not reach the tensor's own hook, so that the hook on the base replaces it."""
        return self.is_modified and graph_task() not in self.passes


class ViewRegion(NamedTuple):
    """The region of a base tensor that a view covers."""

    base_layout: Layout
    view_layout: Layout

    @classmethod
    def of(cls, view: Tensor, base: Tensor) -> ViewRegion:
        """Return the region of a base that a view covers. Both tensors may be detached."""
        offset = int(view.storage_offset()) - int(base.storage_offset())
        return cls((tuple(base.shape), base.stride(), 0), (tuple(view.shape), view.stride(), offset))

    def extract(self, gradient: Tensor) -> Tensor:
        """Return the view's part of the base tensor's gradient."""
        if self.base_layout == self.view_layout:
            return gradient
        return self._with_base_layout(gradient).as_strided(*self.view_layout).clone()

    def insert(self, gradient: Tensor, part: Tensor) -> Tensor:
        """Return the base tensor's gradient with the view's part replaced."""
        if self.base_layout == self.view_layout:
            return part
        return self._with_base_layout(gradient).as_strided_scatter(part, *self.view_layout)

    def _with_base_layout(self, gradient: Tensor) -> Tensor:
        shape, strides, _ = self.base_layout
        return torch.empty_strided(shape, strides, dtype=gradient.dtype, device=gradient.device).copy_(gradient)


class ViewBase(NamedTuple):
    """The position in the graph of a view's base tensor. The gradient there belongs to the view before it was modified in place."""

    node: Any  # the node whose output the base is
    output: int  # the index of this output
    base: Tensor  # without a graph, like the view
    view: Tensor

    @classmethod
    def of(cls, view: Tensor) -> ViewBase | None:
        """Find the base of a view. None if the tensor is not a view, or a view of a leaf."""
        base = view._base
        if base is None or base.grad_fn is None or base.dtype != view.dtype:
            return None
        return cls(base.grad_fn, base.output_nr, base.detach(), view.detach())

    @property
    def region(self) -> ViewRegion:
        return ViewRegion.of(self.view, self.base)


def _hook_node(base: tuple[Any, int, Tensor, Tensor], hook: Hook, when: Callable[[], bool]) -> None:
    """Register a hook on the view's part of the gradient at a `ViewBase`. It runs and can change the gradient if `when` is true."""
    node, output, base_tensor, view = base

    def before_node(gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...] | None:
        gradient = gradients[output]
        if gradient is None or not when():
            return None
        region = ViewRegion.of(view, base_tensor)  # rarely needed, and therefore computed here
        if (new := hook(region.extract(gradient))) is None:
            return None
        return (*gradients[:output], region.insert(gradient, new), *gradients[output + 1 :])

    node.register_prehook(before_node)


def register_at_base(view: Tensor, hook: OutputGradientHook) -> None:
    """Register the gradient hook of a view also at its base, where it runs if the view is modified in place."""
    if (base := ViewBase.of(view)) is not None:
        detached, version = base.view, view._version
        _hook_node(base, hook, lambda: detached._version != version and graph_task() not in hook.passes)


@dataclass(slots=True, eq=False)
class LeafHook:
    """The hook of one call on a leaf tensor."""

    hook: Hook
    # The backward passes through an output of the call, as long as its graph exists; None if the graph is unknown.
    graph_passes: weakref.ref[set[int]] | None
    # The micro-step in which it was registered; -1 if it had fired when a later call registered a hook.
    micro_step_index: int
    has_fired: bool = False

    @property
    def passes(self) -> Collection[int]:
        """The backward passes through the graph of the call; none if it is unknown."""
        return () if self.graph_passes is None else self.graph_passes() or ()

    def is_over(self, micro_step_index: int) -> bool:
        """Return whether its graph no longer exists or, if the graph is unknown, whether its micro-step is over."""
        return self.micro_step_index != micro_step_index if self.graph_passes is None else self.graph_passes() is None


class LeafHooks:
    """Gradient hooks on leaf tensors, which exist longer than a graph. Several threads may use them.

    Each hook belongs to one call, and gets the gradients of the backward passes through the graph of this call. A double
    backward pass can leave out the outputs of the call. Its gradients go to the hooks of the micro-step whose calls had an earlier
    pass or, if no call had one, to all hooks of the micro-step. Hooks that had fired before the latest call are excluded.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._lock = threading.Lock()
        self._hooks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # those of each leaf
        self._handles: list[RemovableHandle] = []

    def register(self, leaf: Tensor, hook: Hook, passes: set[int] | None = None) -> LeafHook:
        """Register a hook for the gradients of one call. Hooks of earlier calls that are over are removed.

        Args:
            passes: The backward passes through the graph of the call. The set exists as long as the graph. None if the graph is unknown,
                because the call returns the leaf.
        """
        new = LeafHook(hook, None if passes is None else weakref.ref(passes), self.clock.micro_step_index)
        with self._lock:
            hooks = self._hooks.get(leaf)
            if hooks is None:
                hooks = self._hooks[leaf] = []
                self._handles = [handle for handle in self._handles if handle.hooks_dict_ref() is not None]
                self._handles.append(leaf.register_hook(partial(self._on_gradient, hooks)))
            for each in hooks:
                each.micro_step_index = -1 if each.has_fired else each.micro_step_index
            hooks[:] = [each for each in hooks if not each.is_over(new.micro_step_index)] + [new]
        return new

    def _on_gradient(self, hooks: Sequence[LeafHook], gradient: Tensor) -> Tensor | None:
        task, new, known = graph_task(), gradient, tuple(hooks)
        own = [each for each in known if task in each.passes]
        current = [each for each in known if each.micro_step_index == self.clock.micro_step_index]
        for each in own or [each for each in current if each.passes] or current:
            each.has_fired = True
            changed = each.hook(new)
            new = new if changed is None else changed
        return None if new is gradient else new

    def release(self) -> None:
        with self._lock:
            self._hooks.clear()
            while self._handles:
                self._handles.pop().remove()


def versions_of(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the versions of tensors by identity. In-place operations increase them."""
    return {id(tensor): tensor._version for tensor in tensors if not tensor.is_inference()}


Edge = tuple[Any, int]
"""A node of the graph and the index of one of its outputs."""


IN_PLACE_ON_VIEW = "CopySlices"
"""PyTorch's name for the node of an in-place operation on a view. Its first input is the base of the view."""


class ModuleContribution:
    """The contribution of a module's operations to the gradient of one tensor in one backward pass. `hook` gets it; see `complete`."""

    def __init__(self, hook: Hook = Tensor.detach) -> None:
        self.hook = hook
        self.is_returned = False
        self.sent: dict[int, list[Tensor]] = {}  # by backward pass; several threads may run passes through one graph
        self.detached: Tensor | None = None
        self.version = 0

    def collect_from(self, node: Any, inputs: Sequence[int], region: ViewRegion | None = None) -> None:
        """Collect the gradients that a node of the module sends through some of its inputs, each time that it runs.

        Args:
            region: The region of the tensor, a view, in what the node modifies in place; None for other nodes.
        """

        def after_node(sent: tuple[Tensor | None, ...], received: object) -> None:  # noqa: ARG001
            given = [gradient for i in inputs if (gradient := sent[i]) is not None]
            self.sent.setdefault(graph_task(), []).extend(given if region is None else map(region.extract, given))

        node.register_hook(after_node)

    def note_returned_view(self, tensor: Tensor) -> None:
        """Note that the module returned a view of the tensor. If it is modified, the nodes of the module drop out of the graph."""
        self.detached, self.version = tensor.detach(), tensor._version  # shares the version counter, but not the graph

    def take(self) -> Tensor | None:
        """Return and remove the contribution of the current backward pass. None if no gradient was collected."""
        sent = self.sent.pop(graph_task(), None)
        return sum(sent[1:], start=sent[0]) if sent else None

    def complete(self, gradient: Tensor) -> None:
        """The hook on the tensor: its gradient is complete, and so is the contribution."""
        total = self.take()
        if self.is_returned:
            self.hook(gradient)
        elif total is not None:
            self.hook(total)
        elif self.detached is not None and self.detached._version != self.version:
            self.hook(gradient)


def edge_of(tensor: Tensor) -> Edge:
    """Return the edge at which a tensor's gradient arrives."""
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def find_contributions(
    outputs: Iterable[Tensor],
    contributions: dict[Edge, ModuleContribution],
    views: dict[Edge, list[tuple[ModuleContribution, ViewRegion]]],
    since: int,
) -> None:
    """Traverse the graph from a module's outputs to its inputs, and collect contributions from the nodes on the way.

    Args:
        contributions: The contributions to its inputs, by the edge at which the gradient arrives.
        views: The contributions to inputs that are views, by the edge of the base tensor.
        since: The smallest sequence number of nodes that were created while the module ran.
    """
    # Several outputs may be those of one node.
    visited = {edge_of(tensor)[0] for tensor in outputs if tensor.requires_grad}
    waiting = [*visited]
    while waiting:
        node = waiting.pop()
        if node._sequence_nr() < since:
            continue
        input_indices: dict[ModuleContribution, list[int]] = {}
        for i, edge in enumerate(node.next_functions):
            if edge in contributions:
                input_indices.setdefault(contributions[edge], []).append(i)
            if edge[0] is not None and edge[0] not in visited:
                visited.add(edge[0])
                waiting.append(edge[0])
        for contribution, inputs in input_indices.items():
            contribution.collect_from(node, inputs)
        if operator_name(node).endswith(IN_PLACE_ON_VIEW):
            for contribution, region in views.get(node.next_functions[0], ()):
                contribution.collect_from(node, [0], region)


class StoredTensors:
    """The tensors of a graph that a module and its submodules store as attributes, such as an auxiliary loss."""

    def __init__(self, module: nn.Module) -> None:
        self._places = [
            (part, name)
            for part in module.modules()
            for name, value in vars(part).items()
            if any(tensor.grad_fn is not None for _, tensor in iter_tensors(value))
        ]

    def __call__(self, copies: Mapping[nn.Module, nn.Module] | None = None) -> list[Tensor]:
        """Return the tensors of the latest call, or those of copies of the modules."""
        owners = ((part if copies is None else copies[part], name) for part, name in self._places)
        return [tensor for part, name in owners for _, tensor in iter_tensors(getattr(part, name, None))]


def next_sequence_number() -> int:
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
