"""The gradients of the tensors of one call of a module or a function, and the hooks that get them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from ..stats.flatten import unreadable
from ..tables.reasons import NO_INPUT_GRAPH, NO_TENSOR
from ..values.nested import iter_tensors, map_tensors
from ..values.sparse import alias_of
from .attached_hook import AttachedHook, no_gradient_reason
from .clock import Clock
from .gradient_hooks import Hook, LeafHooks, TensorGradientHook
from .module_calls import Call
from .plain_calls import firing_of


class CallGradients:
    """The expected gradients of one call of a module, of its inputs or of its outputs."""

    def __init__(self, attached_hooks: Sequence[AttachedHook], call: Call, clock: Clock, in_place: Any = ()) -> None:
        self.attached_hooks = attached_hooks
        if call.graph_is_discarded:
            self.attached_hooks = [attached for attached in attached_hooks if not attached.is_record_hook]
        self.call = call
        self.clock = clock
        self.in_place = in_place
        self.has_tensors = False
        # By path, why a tensor that gets a gradient cannot be read.
        self.unreadable: dict[str, str] = {}
        self.expected_paths: set[str] = set()
        # The identities of tensors that have a separate gradient at each path. Others have one gradient at all paths.
        self.separate: set[int] = set()
        self.registered: set[tuple[AttachedHook, int | str]] = set()
        self.aliases: dict[int | str, Tensor] = {}
        self.unfinished: list[TensorGradientHook] = []
        self.fired: set[AttachedHook] = set()

    def tensors_with_gradient(self, value: Any, root: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a value that can get a gradient, with their paths. `root` is the path of the value."""
        for path, tensor in iter_tensors(value, root) if self.attached_hooks else ():
            self.has_tensors = True
            if tensor.requires_grad and torch.is_grad_enabled():
                if (reason := unreadable(tensor)) is not None:
                    self.unreadable[path] = reason
                    continue
                self.expected_paths.add(path)
                yield path, tensor

    def hook(self, path: str, value: Tensor) -> Hook | None:
        """Return the hook to register on a tensor, the value, at a path; None if no site selects it.

        A tensor at several paths has one gradient, unless it is in `separate`. A site gets it once, with the first path.
        """
        attached_hooks = [
            attached
            for attached in self.attached_hooks
            if attached.matches_path(path) and (attached, self._key(path, value)) not in self.registered
        ]
        if not attached_hooks:
            return None
        self.registered.update((attached, self._key(path, value)) for attached in attached_hooks)
        for attached in attached_hooks:
            attached.note_placement(value, path, firing_of(self.call.index, 0, False, None))
        is_needed = any(attached.site.spec.needs_value for attached in attached_hooks)
        value_copy = value.detach().clone() if is_needed else None
        return gradient_hook(attached_hooks, path, self.call, self.clock, self.fired, value_copy)

    def _key(self, path: str, tensor: Tensor) -> int | str:
        """Return what identifies the gradient of a tensor at a path."""
        return path if id(tensor) in self.separate else id(tensor)

    def register_outputs(
        self, output: Any, versions: Mapping[int, int], leaf_hooks: LeafHooks, *, needs_alias: bool, root: str = ""
    ) -> Any:
        """Register hooks for the gradients of all tensors of an output. Return the output for the caller.

        Call `finish_registration` afterwards.

        Args:
            versions: The versions of the input tensors before the call, by identity.
            needs_alias: Whether the caller gets an alias of every tensor.
        """
        read_only = all(attached.is_record_hook for attached in self.attached_hooks)
        for path, tensor in self.tensors_with_gradient(output, root):
            if (hook := self.hook(path, tensor)) is not None:
                is_new = not tensor.is_leaf and versions.get(id(tensor)) != tensor._version
                if not needs_alias and (is_new or (read_only and not tensor.is_leaf)):
                    self.unfinished.append(TensorGradientHook(tensor, hook))
                elif read_only and not needs_alias:
                    leaf_hooks.register(tensor, hook)
                else:
                    self.unfinished.append(TensorGradientHook(self.alias(path, tensor), hook))
        return self.with_aliases(output)

    def finish_registration(self) -> None:
        """Register the hooks for outputs that are modified in place later. They act in the order of these calls."""
        for hook in self.unfinished:
            hook.finish_registration()
        self.unfinished.clear()

    def alias(self, path: str, tensor: Tensor) -> Tensor:
        return self.aliases.setdefault(self._key(path, tensor), alias_of(tensor))

    def with_aliases(self, value: Any) -> Any:
        """Replace tensors by their aliases. A tensor at several paths is replaced by the same alias, unless it is in `separate`."""
        if not self.aliases:
            return value
        return map_tensors(
            value, lambda path, tensor: self.aliases.get(self._key(path, tensor), tensor), in_place=self.in_place
        )

    def count_opportunities(self, *, missing_is_expected: bool) -> None:
        """Count the opportunities of all sites after the registration; `missing_is_expected`: whether the tensors may be data."""
        for attached in self.attached_hooks:
            if self.call.repeats:
                continue
            if any(attached.matches_path(path) for path in self.expected_paths):
                attached.opportunities += 1
            elif reasons := [reason for path, reason in self.unreadable.items() if attached.matches_path(path)]:
                attached.count_missed_opportunity(reasons[0])
            elif missing_is_expected and self.has_tensors and attached.is_record_hook and torch.is_grad_enabled():
                attached.count_exempt(NO_INPUT_GRAPH)
            else:
                attached.count_missed_opportunity(no_gradient_reason() if self.has_tensors else NO_TENSOR)

    def miss_callback(self, reason: str) -> Callable[[str], None]:
        """Return a function that counts a miss for each hook; `reason` has a field `{}` for its argument. It does not refer to the call."""
        attached_hooks, fired = () if self.call.repeats else tuple(self.attached_hooks), self.fired

        def count_misses(detail: str) -> None:
            for attached in attached_hooks:
                if attached in fired:  # in an earlier backward pass
                    attached.opportunities += 1
                attached.count_miss(reason.format(detail))

        return count_misses


def gradient_hook(
    attached_hooks: Sequence[AttachedHook],
    path: str,
    call: Call,
    clock: Clock,
    fired: set[AttachedHook],
    value: Tensor | None = None,
) -> Hook:
    """Return the hook to register on a tensor, which calls several sites.

    Args:
        fired: Receives the sites when they fire for the first time. Those in it are not counted again.
        value: A copy of the tensor, if a site needs it.
    """
    return partial(
        _on_gradient, attached_hooks, path, call.index, call.is_recomputed, call.origin, clock, fired, value, count()
    )


def _on_gradient(  # noqa: PLR0917
    attached_hooks: Sequence[AttachedHook],
    path: str,
    index: int,
    recompute: bool,
    origin: int,
    clock: Clock,
    fired: set[AttachedHook],
    value: Tensor | None,
    passes: Iterator[int],
    gradient: Tensor | None,
) -> Tensor | None:
    """The hook of `gradient_hook`. It does not refer to the call, which may refer to tensors of the graph."""
    # The gradient is None if an operation has several outputs and this one is unused.
    if clock.closed or gradient is None:
        return None
    firing, new = firing_of(index, next(passes), recompute, origin), gradient
    for attached in attached_hooks:
        attached.count_gradient(is_repeated=attached in fired)
        fired.add(attached)
        changed = None if attached.direct is None else attached.direct(new, path, firing)
        new = attached.fire(new, path, firing, value=value) if changed is None else changed
    return None if new is gradient else new


def finish_gradient(
    attached_hooks: Sequence[AttachedHook], clock: Clock, done: int, call: int, backward: int, gradient: Tensor
) -> Tensor | None:
    """Run those hooks on the gradient of an output that `PlainCalls` has not run; see `gradient_hook`.

    Args:
        done: How many of the sites have recorded the gradient.
        backward: The index of the gradient, from 0. Firings of later ones are not counted.
    """
    fired = set(attached_hooks if backward else ())
    return _on_gradient(attached_hooks[done:], "", call, False, call, clock, fired, None, count(backward), gradient)
