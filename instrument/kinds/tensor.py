"""Gradients of a module's inputs and outputs, by hooks on the tensors.

They give the values that PyTorch's module hooks give, to the bit, and unlike those they survive operations in place
on the module's input or output (`instrument.kinds.awaited`).

A tensor that several modules take has one gradient, the sum. `grad_input` is the share of one module: to look at it,
it is read off the graph (`instrument.kinds.share`); to change it, the module is handed an alias of its own.

An output that is the input itself (`nn.Identity`, dropout that is off), or a parameter, is one tensor with one gradient,
from all who use it. To look at it, that is what there is: an alias would tell apart what came by way of the module, and
change the order of the sum, and with it the last bit of the weights. To change it, the caller is handed an alias.

So it is where `full_backward_pre` changes a gradient. Operations that save their output (tanh, softmax) depend on it a
second time in a double backward pass, and that is inside the module: it is to pass by the hook, as it does with PyTorch's.

No hook holds a tensor that belongs to a graph: the graph holds the hook, and neither would ever be freed.
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
from .awaited import Awaited, Behind, Hook, LeafHooks, Part
from .calls import Call
from .causes import NO_INPUT_GRAPH, NO_TENSOR
from .live import Clock, Firing, LiveSite, fire_all, no_graph
from .share import Edge, Share, edge_of, find_shares, next_number


class GradientCall:
    """The gradients of one call of a module, at one end of it, while they are awaited."""

    def __init__(self, lives: Sequence[LiveSite], call: Call, clock: Clock) -> None:
        self.lives = [live for live in lives if not live.records] if call.seen_before else lives
        self.call = call
        self.clock = clock
        self.seen = False
        self.unreadable: dict[str, str] = {}  # by path, why a tensor that gets a gradient has no values to read
        self.awaited: set[str] = set()
        self.taken: set[tuple[LiveSite, int]] = set()
        self.aliases: dict[int, Tensor] = {}
        self.fired: set[LiveSite] = set()

    def awaitable(self, value: Any) -> Iterator[tuple[str, Tensor]]:
        """The tensors of a value that can get a gradient, with their paths."""
        for path, tensor in leaves(value) if self.lives else ():
            self.seen = True
            if tensor.requires_grad and torch.is_grad_enabled():
                if (cause := unreadable(tensor)) is not None:
                    self.unreadable[path] = cause
                    continue
                self.awaited.add(path)
                yield path, tensor

    def hook(self, path: str, value: Tensor) -> Hook | None:
        """What is to be registered on a tensor; None where no site means it.

        A tensor that stands at several paths has one gradient, which a site gets once, at the first of them.

        Args:
            path: Where the tensor stands.
            value: What the gradient will be the gradient of.
        """
        lives = [live for live in self.lives if live.wants(path) and (live, id(value)) not in self.taken]
        if not lives:
            return None
        self.taken.update((live, id(value)) for live in lives)
        kept = value.detach().clone() if any(live.needs_value for live in lives) else None
        fired, clock, number, again = self.fired, self.clock, self.call.number, self.call.again
        passes = count()

        def deliver(gradient: Tensor | None) -> Tensor | None:
            if clock.closed or gradient is None:  # None: an operation gave several tensors, and this one is not used
                return None
            for live in lives:
                if live not in fired:
                    fired.add(live)
                    live.hit()
            new = fire_all(lives, gradient, path, Firing(number, next(passes), again), kept)
            return None if new is gradient else new

        return deliver

    def alias(self, tensor: Tensor) -> Tensor:
        """A tensor's alias in this call."""
        return self.aliases.setdefault(id(tensor), tensor.view_as(tensor))

    def with_aliases(self, value: Any) -> Any:
        """The value with the aliases in it: what was one tensor at several paths is one alias at all of them."""
        if not self.aliases:
            return value
        return map_leaves(value, lambda _, tensor: self.aliases.get(id(tensor), tensor))

    def bespoken(self, *, no_fault: bool) -> None:
        """All tensors of the call have been gone through: settle which sites can still fire.

        Args:
            no_fault: Where no tensor needs a gradient, that is the nature of the place: it is data.
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
    """What a module was given in one call: its inputs, where their gradients are awaited, until it has run."""

    def __init__(self) -> None:
        self.since = next_number()
        self.aliases: list[tuple[Tensor, Awaited]] = []
        self.shares: dict[Edge, tuple[Share, Tensor]] = {}
        self.views: dict[Edge, list[tuple[Share, Part]]] = {}

    def add_share(self, share: Share, tensor: Tensor) -> None:
        """The module's share of an input's gradient is asked for."""
        self.shares[edge_of(tensor)] = share, tensor
        if (behind := Behind.of(tensor)) is not None:
            self.views.setdefault((behind.node, behind.output), []).append((share, behind.part))

    def done(self, output: Any) -> None:
        """The module has run: find its shares; where it wrote to an alias in place, or gave it away, look behind it too."""
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
    """The gradients of what goes into a module: its own share (`full_backward`), or in total (`tensor`)."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.own: list[LiveSite] = []
        self.total: list[LiveSite] = []
        self.on_leaves = LeafHooks(clock)
        self.hooked = WeakTensorKeyDictionary()  # tensors with a hook for the total

    @property
    def wanted(self) -> bool:
        """Whether any site awaits such a gradient."""
        return bool(self.own or self.total)

    def bespeak(self, module: nn.Module, value: Any, call: Call) -> Any:
        """Register for every tensor of the input; gives the input that the module is to be called with."""
        own = GradientCall(self.own, call, self.clock)
        total = GradientCall(self.total, call, self.clock)
        in_place = _writes_to_its_input(module)
        looking = all(live.records for live in own.lives)
        given = call.given = Given()
        for path, tensor in total.awaitable(value):
            if call.again and tensor in self.hooked:  # checkpointing hands in the very tensor of the first pass
                continue
            if (hook := total.hook(path, tensor)) is not None:
                self.hooked[tensor] = True
                self.on_leaves.register(tensor, hook) if tensor.is_leaf else Awaited(tensor, hook).settle()
        for path, tensor in own.awaitable(value):
            if (hook := own.hook(path, tensor)) is None:
                continue
            if in_place and not tensor._is_view():  # nobody but the module sees the tensor as it is now
                tensor.register_hook(hook)
            elif looking and not in_place:  # one that writes in place takes its input once
                given.add_share(self._share(tensor, hook), tensor)
            else:
                alias = own.alias(tensor)
                given.aliases.append((alias, Awaited(alias, hook)))
        own.bespoken(no_fault=True)
        total.bespoken(no_fault=True)
        return own.with_aliases(value)

    def _share(self, tensor: Tensor, hook: Hook) -> Share:
        """Await the module's share without a trace in the graph; it is whole when the tensor's gradient is."""
        share = Share(hook)
        if tensor.is_leaf:
            self.on_leaves.register(tensor, share.complete)
        else:
            Awaited(tensor, share.complete).settle()
        return share


class OutputGradients:
    """The gradients of what comes out of a module."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.lives: list[LiveSite] = []
        self.on_leaves = LeafHooks(clock)

    def note_inputs(self, value: Any, call: Call) -> None:
        """Remember which tensors went in, and at which version, to know an output that is the input itself."""
        inputs = [tensor for _, tensor in leaves(value)]
        call.versions = {id(tensor): tensor._version for tensor in inputs if not tensor.is_inference()}
        call.on_data = not any(tensor.requires_grad for tensor in inputs)

    def bespeak(self, module: nn.Module, output: Any, call: Call) -> Any:
        """Register for every tensor of the output; gives the output that the caller is to get."""
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
    """Whether a module says that it works in place, and does: dropout that is off gives back what it was given."""
    is_off = isinstance(module, _DropoutNd) and not (module.training and module.p)
    return getattr(module, "inplace", False) is True and not is_off
