"""The contribution of one module to the gradient of a tensor, computed from the graph.

A tensor that is used by several operations has one gradient: the sum of their contributions, in the order in which they
arrive. An alias would separate the contribution of a module, but would also change the order of the sum and its
rounding. To record without side effects, the operations of the module that use the tensor are found in the graph, and
their contributions are summed separately.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from ..values.nested import iter_tensors
from .clock import graph_task
from .gradient_hooks import Hook, ViewRegion

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
            parts = given if region is None else map(region.extract, given)
            self.sent.setdefault(graph_task(), []).extend(parts)

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
    waiting = [edge_of(tensor)[0] for tensor in outputs if tensor.requires_grad]
    visited = set(waiting)
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
        if node.name().endswith(IN_PLACE_ON_VIEW):
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
        return [
            tensor
            for part, name in self._places
            for _, tensor in iter_tensors(getattr(part if copies is None else copies[part], name, None))
        ]


def next_sequence_number() -> int:
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
