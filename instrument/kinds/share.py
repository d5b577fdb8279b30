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

from .awaited import Awaited, Hook

Edge = tuple[Any, int]
"""A node of the graph, and which of its outputs."""


class Share:
    """What a module's operations send back to one tensor in one backward pass."""

    def __init__(self, hook: Hook) -> None:
        self.hook = hook
        self.nodes = 0  # of the module's that take the tensor
        self.sent: list[Tensor] = []
        self.witness: Tensor | None = None
        self.version = 0

    def take(self, node: Any, inputs: list[int]) -> None:
        """Take what a node of the module's sends back through some of its inputs, each time that it runs."""

        def after_node(sent: tuple[Tensor | None, ...], received: object) -> None:  # noqa: ARG001
            self.sent += [gradient for i in inputs if (gradient := sent[i]) is not None]

        node.register_hook(after_node)
        self.nodes += 1

    def pass_on(self, alias: Tensor) -> None:
        """Take what comes back to an alias of the tensor that the module gave out as it is."""
        Awaited(alias, self.add if self.nodes else self.hook).settle()

    def add(self, gradient: Tensor) -> None:
        """One more part of it is there."""
        self.sent.append(gradient)

    def given_away(self, tensor: Tensor) -> None:
        """The module gave out a view of the tensor: where that is written to, the module's nodes drop out of the graph."""
        self.witness, self.version = tensor.detach(), tensor._version  # shares the version counter, not the graph

    def complete(self, gradient: Tensor) -> None:
        """The tensor's whole gradient is there, and so is the share: a hook on the tensor."""
        sent, self.sent = self.sent, []
        if sent:
            self.hook(sum(sent[1:], start=sent[0]))
        elif self.witness is not None and self.witness._version != self.version:
            self.hook(gradient)


def edge_of(tensor: Tensor) -> Edge:
    """Where a tensor's gradient arrives."""
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def find_shares(outputs: Iterable[Tensor], shares: dict[Edge, Share], since: int) -> None:
    """Go back from a module's outputs to what it was given, and let each share take from the nodes on the way.

    Args:
        outputs: The module's outputs.
        shares: What it was given, by the edge at which the gradient arrives.
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


def next_number() -> int:
    """The number that the next node will have."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]
