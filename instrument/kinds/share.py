"""The share that one module has in the gradient of a tensor, read off the graph.

A tensor that several operations take has one gradient, the sum of what each of them sends back, added up in the order
in which they do. An alias would tell a module's share apart, but it would also add that share up first: another order,
another last bit. To look and change nothing, the operations of the module that take the tensor are found in the graph,
and what they send back is added up here, beside the graph.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from .awaited import Hook, Part

Edge = tuple[Any, int]
"""A node of the graph, and which of its outputs."""


IN_PLACE_ON_VIEW = "CopySlices"
"""What PyTorch calls the node of an operation that writes to a view; its first input is what the view is a view of."""


class Share:
    """What a module's operations send back to one tensor in one backward pass."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.passed_on = False
        self.sent: list[Tensor] = []
        self.witness: Tensor | None = None
        self.version = 0

    def take(self, node: Any, inputs: list[int]) -> None:
        """Take what a node of the module's sends back through some of its inputs, each time that it runs."""

        def after_node(sent: tuple[Tensor | None, ...], received: object) -> None:  # noqa: ARG001
            self.sent += [gradient for i in inputs if (gradient := sent[i]) is not None]

        node.register_hook(after_node)

    def take_part(self, node: Any, part: Part) -> None:
        """Take what a node of the module's sends back that writes in place to the tensor, a view: the view's part."""

        def after_node(sent: tuple[Tensor | None, ...], received: object) -> None:  # noqa: ARG001
            if sent[0] is not None:
                self.sent.append(part.of(sent[0]))

        node.register_hook(after_node)

    def given_away(self, tensor: Tensor) -> None:
        """The module gave out a view of the tensor: where that is written to, the module's nodes drop out of the graph."""
        self.witness, self.version = tensor.detach(), tensor._version  # shares the version counter, not the graph

    def complete(self, gradient: Tensor) -> None:
        """The tensor's whole gradient is there, and so is the share: a hook on the tensor."""
        sent, self.sent = self.sent, []
        if self.passed_on:
            self.hook(gradient)
        elif sent:
            self.hook(sum(sent[1:], start=sent[0]))
        elif self.witness is not None and self.witness._version != self.version:
            self.hook(gradient)


def edge_of(tensor: Tensor) -> Edge:
    """Where a tensor's gradient arrives."""
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def find_shares(
    outputs: Iterable[Tensor], shares: dict[Edge, Share], views: dict[Edge, list[tuple[Share, Part]]], since: int
) -> None:
    """Go back from a module's outputs to what it was given, and let each share take from the nodes on the way.

    Args:
        outputs: The module's outputs.
        shares: What it was given, by the edge at which the gradient arrives.
        views: What it was given that are views, by the edge of the tensor that they are views of.
        since: The number that nodes have at least that came into being while the module ran.
    """
    waiting = [edge_of(tensor)[0] for tensor in outputs if tensor.requires_grad]
    met = set(waiting)
    while waiting:
        node = waiting.pop()
        if node._sequence_nr() < since:
            continue
        taken: dict[Share, list[int]] = {}
        for i, edge in enumerate(node.next_functions):
            if edge in shares:
                taken.setdefault(shares[edge], []).append(i)
            if edge[0] is not None and edge[0] not in met:
                met.add(edge[0])
                waiting.append(edge[0])
        for share, inputs in taken.items():
            share.take(node, inputs)
        if node.name().endswith(IN_PLACE_ON_VIEW):
            for share, part in views.get(node.next_functions[0], ()):
                share.take_part(node, part)


def next_number() -> int:
    """The number that the next node will have."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
