"""Gradients of a module's inputs and outputs, by hooks on the tensors.

The values are bit-identical to those of PyTorch's module hooks. Unlike these, they also work with in-place operations
on the module's input or output (`instrument.kinds.gradient_hooks`).

A tensor that several modules use has one gradient, the sum of all contributions. `grad_input` is the contribution of
one module. To record it, it is computed from the graph (`instrument.kinds.module_gradient`); to change it, the module receives an
alias of the input.

An output that is the input itself (`nn.Identity`, disabled dropout), or a parameter, is one tensor with one gradient
from all uses. Record hooks record this gradient: an alias would separate the contributions, and would change the order
of the sum and thereby the rounding of the weights. To change the gradient, the caller receives an alias.

The same holds if `full_backward_pre` changes a gradient. In a double backward pass, operations that save their output
(tanh, softmax) depend on it a second time inside the module. That gradient must not reach the hook, as with PyTorch's
hooks.

No hook refers to a tensor of the graph: the graph refers to the hook, and neither would ever be freed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.weak import WeakTensorKeyDictionary

from ..nested import leaves, map_leaves
from ..stats.vector import unreadable
from .attached import Clock, Firing, LiveSite, fire_all, no_graph
from .calls import Call
from .gradient_hooks import Awaited, Behind, Hook, LeafHooks, Part
from .module_gradient import Edge, Share, edge_of, find_shares, next_number
from .reasons import NO_INPUT_GRAPH, NO_TENSOR


class GradientCall:
    """The expected gradients of one call of a module, of its inputs or of its outputs."""

    def __init__(self, lives: Sequence[LiveSite], call: Call, clock: Clock) -> None:
        self.lives = [live for live in lives if not live.records] if call.seen_before else lives
        self.call = call
        self.clock = clock
        self.seen = False
        # By path, why a tensor that gets a gradient cannot be read.
        self.unreadable: dict[str, str] = {}
        self.awaited: set[str] = set()
        self.taken: set[tuple[LiveSite, int]] = set()
        self.aliases: dict[int, Tensor] = {}
        self.fired: set[LiveSite] = set()

    def awaitable(self, value: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a value that can get a gradient, with their paths."""
        for path, tensor in leaves(value) if self.lives else ():
            self.seen = True
            if tensor.requires_grad and torch.is_grad_enabled():
                if (cause := unreadable(tensor)) is not None:
                    self.unreadable[path] = cause
                    continue
                self.awaited.add(path)
                yield path, tensor

    def hook(self, path: str, value: Tensor) -> Hook | None:
        """Return the hook to register on a tensor; None if no site selects it.

        A tensor at several paths has one gradient. A site gets it once, with the first path.

        Args:
            path: The path of the tensor.
            value: The tensor that the gradient belongs to.
        """
        lives = [live for live in self.lives if live.wants(path) and (live, id(value)) not in self.taken]
        if not lives:
            return None
        self.taken.update((live, id(value)) for live in lives)
        kept = value.detach().clone() if any(live.needs_value for live in lives) else None
        fired, clock, number, again = self.fired, self.clock, self.call.number, self.call.again
        passes = count()

        def deliver(gradient: Tensor | None) -> Tensor | None:
            # None: an operation has several outputs, and this one is unused.
            if clock.closed or gradient is None:
                return None
            for live in lives:
                if live not in fired:
                    fired.add(live)
                    live.hit()
            new = fire_all(lives, gradient, path, Firing(number, next(passes), again), kept)
            return None if new is gradient else new

        return deliver

    def alias(self, tensor: Tensor) -> Tensor:
        """Return the alias of a tensor in this call."""
        return self.aliases.setdefault(id(tensor), tensor.view_as(tensor))

    def with_aliases(self, value: Any) -> Any:
        """Replace tensors by their aliases. A tensor at several paths is replaced by the same alias."""
        if not self.aliases:
            return value
        return map_leaves(value, lambda _, tensor: self.aliases.get(id(tensor), tensor))

    def bespoken(self, *, no_fault: bool) -> None:
        """Count the opportunities of all sites after the hooks of the call were registered.

        Args:
            no_fault: Whether tensors without a gradient are expected, because they are data.
        """
        for live in self.lives:
            if self.call.again:
                continue
            if any(live.wants(path) for path in self.awaited):
                live.called()
            elif causes := [cause for path, cause in self.unreadable.items() if live.wants(path)]:
                live.called()
                live.miss(causes[0])
            elif no_fault and self.seen and live.records and torch.is_grad_enabled():
                live.excuse(NO_INPUT_GRAPH)
            else:
                live.called()
                live.miss(no_graph() if self.seen else NO_TENSOR)


class Given:
    """The inputs of one call whose gradients are expected, until the module has run."""

    def __init__(self) -> None:
        self.since = next_number()
        self.aliases: list[tuple[Tensor, Awaited]] = []
        self.shares: dict[Edge, tuple[Share, Tensor]] = {}
        self.views: dict[Edge, list[tuple[Share, Part]]] = {}

    def add_share(self, share: Share, tensor: Tensor) -> None:
        """Register the module's contribution to an input's gradient."""
        self.shares[edge_of(tensor)] = share, tensor
        if (behind := Behind.of(tensor)) is not None:
            self.views.setdefault((behind.node, behind.output), []).append((share, behind.part))

    def done(self, output: Any) -> None:
        """Complete the registration after the module has run.

        Find its contributions. If it modified or returned an alias, also register a hook on the base.
        """
        if self.shares:
            self._find_shares(output)
        given = {id(part) for _, tensor in leaves(output) for part in (tensor, tensor._base) if part is not None}
        for alias, awaited in self.aliases:
            awaited.settle(given.isdisjoint((id(alias), id(alias._base))))

    def _find_shares(self, output: Any) -> None:
        outputs = [tensor for _, tensor in leaves(output)]
        find_shares(outputs, {edge: share for edge, (share, _) in self.shares.items()}, self.views, self.since)
        bases = {id(tensor._base) for tensor in outputs if tensor._base is not None}
        for share, tensor in self.shares.values():
            if not bases.isdisjoint((id(tensor), id(tensor._base))):
                share.given_away(tensor)
        for tensor in outputs:
            if tensor.requires_grad and (found := self.shares.get(edge_of(tensor))) is not None:
                found[0].passed_on = True


class InputGradients:
    """The gradients of a module's inputs: its own contribution (`full_backward`), or the total (`tensor`)."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.own: list[LiveSite] = []
        self.total: list[LiveSite] = []
        self.on_leaves = LeafHooks(clock)
        self.hooked = WeakTensorKeyDictionary()  # tensors with a hook for the total gradient

    @property
    def wanted(self) -> bool:
        """Whether any site expects such a gradient."""
        return bool(self.own or self.total)

    def bespeak(self, module: nn.Module, value: Any, call: Call) -> Any:
        """Register hooks for all input tensors. Return the input with which to call the module."""
        own = GradientCall(self.own, call, self.clock)
        total = GradientCall(self.total, call, self.clock)
        in_place = _writes_to_its_input(module)
        looking = all(live.records for live in own.lives)
        given = call.given = Given()
        for path, tensor in total.awaitable(value):
            if call.again and tensor in self.hooked:  # checkpointing passes the same tensor object again
                continue
            if (hook := total.hook(path, tensor)) is not None:
                self.hooked[tensor] = True
                self.on_leaves.register(tensor, hook) if tensor.is_leaf else Awaited(tensor, hook).settle()
        for path, tensor in own.awaitable(value):
            if (hook := own.hook(path, tensor)) is None:
                continue
            if in_place and not tensor._is_view():  # only the module uses this version of the tensor
                tensor.register_hook(hook)
            elif looking and not in_place:  # an in-place module uses its input once
                given.add_share(self._share(tensor, hook), tensor)
            else:
                alias = own.alias(tensor)
                given.aliases.append((alias, Awaited(alias, hook)))
        own.bespoken(no_fault=True)
        total.bespoken(no_fault=True)
        return own.with_aliases(value)

    def _share(self, tensor: Tensor, hook: Hook) -> Share:
        """Register for the module's contribution without changing the graph.

        It is complete when the tensor's gradient is.
        """
        share = Share(hook)
        if tensor.is_leaf:
            self.on_leaves.register(tensor, share.complete)
        else:
            Awaited(tensor, share.complete).settle()
        return share


class OutputGradients:
    """The gradients of a module's outputs."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.lives: list[LiveSite] = []
        self.on_leaves = LeafHooks(clock)

    def note_inputs(self, value: Any, call: Call) -> None:
        """Store the input tensors and their versions, to detect outputs that are inputs."""
        inputs = [tensor for _, tensor in leaves(value)]
        call.versions = {id(tensor): tensor._version for tensor in inputs if not tensor.is_inference()}
        call.on_data = not any(tensor.requires_grad for tensor in inputs)

    def bespeak(self, module: nn.Module, output: Any, call: Call) -> Any:
        """Register hooks for all output tensors. Return the output for the caller."""
        awaiting = GradientCall(self.lives, call, self.clock)
        looking = all(live.records for live in awaiting.lives)
        apart = any(not live.records and live.site.spec.kind == "full_backward_pre" for live in awaiting.lives)
        for path, tensor in awaiting.awaitable(output):
            if (hook := awaiting.hook(path, tensor)) is not None:
                is_own = not tensor.is_leaf and call.versions.get(id(tensor)) != tensor._version
                if (is_own and not apart) or (looking and not tensor.is_leaf):
                    Awaited(tensor, hook).settle()
                elif looking:
                    self.on_leaves.register(tensor, hook)
                else:
                    Awaited(awaiting.alias(tensor), hook).settle()
        by_nature = call.on_data and not awaiting.awaited and next(module.parameters(), None) is None
        awaiting.bespoken(no_fault=by_nature)
        return awaiting.with_aliases(output)


def _writes_to_its_input(module: nn.Module) -> bool:
    """Return whether a module works in place. Disabled dropout returns its input unchanged."""
    is_off = isinstance(module, _DropoutNd) and not (module.training and module.p)
    return getattr(module, "inplace", False) is True and not is_off
