"""Gradients of the inputs and outputs of a module or a function, by hooks on the tensors.

The values are bit-identical to those of PyTorch's module hooks. Unlike these, they also work with in-place operations
on the module's input or output (`instrument.hooks.gradient_hooks`).

A tensor that several modules use has one gradient, the sum of all contributions. `grad_input` is the contribution of
one module. To record it, it is computed from the graph (`ModuleContribution`); to change it, the module
receives an alias of the input.

If a module returns its input (`nn.Identity`, disabled dropout) or a parameter, input and output are the same tensor, and
its gradient sums all uses. Record hooks record this gradient: an alias would separate the contributions, and would change the order
of the sum and thereby the rounding of the weights. To change the gradient, the caller receives an alias.

The same holds if `full_backward_pre` changes a gradient. In a double backward pass, operations that save their output
(tanh, softmax) depend on it a second time inside the module. That gradient must not reach the hook, as with PyTorch's
hooks.

No hook refers to a tensor of the graph: the graph refers to the hook, and neither would ever be freed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.weak import WeakTensorKeyDictionary

from ..stats.flatten import is_wrapped, unreadable
from ..tables.reasons import NO_ARGUMENTS, NO_INPUT_GRAPH, NO_OUTPUT_GRAPH, NO_TENSOR, REPEATED_ARGUMENT, WRAPPED
from ..values.nested import iter_tensors, map_tensors
from ..values.sparse import alias_of
from .attached_hook import AttachedHook, no_gradient_reason
from .clock import Clock, graph_task
from .gradient_hooks import (
    Edge,
    Hook,
    LeafHook,
    LeafHooks,
    ModuleContribution,
    StoredTensors,
    TensorGradientHook,
    ViewBase,
    ViewRegion,
    edge_of,
    find_contributions,
    next_sequence_number,
)
from .module_calls import Call
from .plain_calls import firing_of, is_plain_float
from .separate_arguments import Inputs, SeparateArguments, SeparateGradients, repeated_tensors


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
        self.has_arguments = True  # whether the call has arguments, if these are gradients of inputs
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
        # Hooks that outer and later modules register on the same tensor get its gradient before it is changed.
        self.aliases = {key: alias_of(alias) for key, alias in self.aliases.items()}
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
            elif not self.has_arguments and attached.is_record_hook:
                attached.count_exempt(NO_ARGUMENTS)
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
    if is_wrapped(gradient):
        for attached in attached_hooks:
            attached.count_miss(WRAPPED)
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


class PendingInputGradients:
    """The inputs of one call whose gradients are expected, until the module has run."""

    def __init__(self, stored: Callable[[], StoredTensors], count_misses: Callable[[str], None]) -> None:
        self.since = next_sequence_number()
        self.stored = stored
        self.count_misses = count_misses
        # The backward passes through the outputs of the call, if a hook on a leaf needs them.
        self.passes: set[int] = set()
        self.on_leaves: list[LeafHook] = []
        self.aliases: list[tuple[Tensor, TensorGradientHook]] = []
        self.contributions: dict[Edge, tuple[ModuleContribution, Tensor]] = {}
        self.views: dict[Edge, list[tuple[ModuleContribution, ViewRegion]]] = {}
        self.repeated: list[SeparateArguments] = []

    def add_contribution(
        self, leaf_hooks: LeafHooks, tensor: Tensor, contribution: ModuleContribution, hook: Hook
    ) -> None:
        """Collect the module's contribution to an input's gradient, and register the hook that gets the complete gradient."""
        self.register(leaf_hooks, tensor, hook)
        self.contributions[edge_of(tensor)] = contribution, tensor
        if (base := ViewBase.of(tensor)) is not None:
            self.views.setdefault((base.node, base.output), []).append((contribution, base.region))

    def register(self, leaf_hooks: LeafHooks, tensor: Tensor, hook: Hook) -> None:
        if tensor.is_leaf:
            self.on_leaves.append(leaf_hooks.register(tensor, hook, self.passes))
        else:
            TensorGradientHook(tensor, hook).finish_registration()

    def complete(self, output: Any) -> None:
        """Find the contributions of the module that has run. If it modified or returned an alias, also register a hook on the base."""
        if self.on_leaves:
            passes = self.passes  # the hooks on the outputs keep them as long as the graph exists
            outputs = [tensor for _, tensor in iter_tensors(output) if tensor.grad_fn is not None]
            for tensor in outputs:
                TensorGradientHook(tensor, lambda _: passes.add(graph_task())).finish_registration()
            for on_leaf in self.on_leaves if not outputs else ():
                on_leaf.graph_passes = None
        if self.contributions:
            stored = self.stored()
            self._find_contributions(output, stored())
            for arguments in self.repeated:
                arguments.evaluate(output, stored)
        returned = {id(part) for _, each in iter_tensors(output) for part in (each, each._base) if part is not None}
        for alias, hook in self.aliases:
            hook.finish_registration(returned.isdisjoint((id(alias), id(alias._base))))

    def _find_contributions(self, output: Any, stored: list[Tensor]) -> None:
        outputs = [tensor for _, tensor in iter_tensors(output)]
        if not any(tensor.requires_grad for tensor in (*outputs, *stored)):
            self.count_misses("")
        contributions = {edge: contribution for edge, (contribution, _) in self.contributions.items()}
        find_contributions([*outputs, *stored], contributions, self.views, self.since)
        bases = {id(tensor._base) for tensor in outputs if tensor._base is not None}
        for contribution, tensor in self.contributions.values():
            if not bases.isdisjoint((id(tensor), id(tensor._base))):
                contribution.note_returned_view(tensor)
        for tensor in outputs:
            if tensor.requires_grad and (entry := self.contributions.get(edge_of(tensor))) is not None:
                entry[0].is_returned = True


class InputGradients:
    """The gradients of a module's inputs: its own contribution (`full_backward`), or the total (`tensor`)."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.contribution_hooks: list[AttachedHook] = []
        self.total_hooks: list[AttachedHook] = []
        self.leaf_hooks = LeafHooks(clock)
        self.stored: StoredTensors | None = None
        self.hooked = WeakTensorKeyDictionary()  # tensors with a hook for the total gradient

    def register(self, module: nn.Module, value: dict[str, Any], positional: int, call: Call) -> dict[str, Any]:
        """Register hooks for all input tensors; see `Inputs`. Return the input with which to call the module."""
        in_place = _writes_to_its_input(module)
        totals = CallGradients(self.total_hooks, call, self.clock)
        contributions = CallGradients(self.contribution_hooks, call, self.clock)
        totals.has_arguments = contributions.has_arguments = bool(value)
        count_misses = contributions.miss_callback(NO_OUTPUT_GRAPH)
        pending = PendingInputGradients(partial(self._stored_tensors, module), count_misses)
        call.on_output = pending.complete
        for path, tensor in totals.tensors_with_gradient(value):
            if call.is_recomputed and tensor in self.hooked:  # checkpointing passes the same tensor object again
                continue
            if (hook := totals.hook(path, tensor)) is not None:
                self.hooked[tensor] = True
                pending.register(self.leaf_hooks, tensor, hook)
        if not in_place:
            contributions.separate = repeated_tensors(value)
        inputs = Inputs(module, value, positional)
        value = self._register_contributions(contributions, inputs, pending, in_place=in_place)
        contributions.count_opportunities(missing_is_expected=True)
        totals.count_opportunities(missing_is_expected=True)
        return value

    def _register_contributions(
        self, contributions: CallGradients, inputs: Inputs, pending: PendingInputGradients, *, in_place: bool
    ) -> dict[str, Any]:
        """Register hooks for the contributions of a module to the gradients of its inputs. Return its inputs."""
        read_only = all(attached.is_record_hook for attached in contributions.attached_hooks)
        repeated: dict[int, dict[str, tuple[Tensor, Hook]]] = {}
        for path, tensor in contributions.tensors_with_gradient(inputs.arguments):
            if (hook := contributions.hook(path, tensor)) is None:
                continue
            if in_place and not tensor._is_view():  # only the module uses this version of the tensor
                tensor.register_hook(hook)
            elif not read_only or in_place:  # an in-place module uses its input once
                alias = contributions.alias(path, tensor)
                # A gradient that the module computes while it runs, such as a force, does not flow to the previous modules.
                pending.aliases.append((alias, TensorGradientHook(alias, hook, is_active=False)))
            elif id(tensor) in contributions.separate:
                repeated.setdefault(id(tensor), {})[path] = tensor, hook
            else:
                contribution = ModuleContribution(hook)
                pending.add_contribution(self.leaf_hooks, tensor, contribution, contribution.complete)
        for separate in repeated.values():
            tensor = next(tensor for tensor, _ in separate.values())
            hooks = {path: hook for path, (_, hook) in separate.items()}
            gradients = SeparateGradients(hooks, contributions.miss_callback(REPEATED_ARGUMENT))
            contribution = ModuleContribution()
            pending.add_contribution(self.leaf_hooks, tensor, contribution, partial(gradients.deliver, contribution))
            pending.repeated.append(SeparateArguments(inputs, tensor, gradients))
        return contributions.with_aliases(inputs.arguments)  # type: ignore[no-any-return]

    def _stored_tensors(self, module: nn.Module) -> StoredTensors:
        """Return the tensors that the module stores. The attributes are those with tensors after its first call."""
        self.stored = self.stored or StoredTensors(module)
        return self.stored


class OutputGradients:
    """The gradients of a module's outputs."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.attached_hooks: Sequence[AttachedHook] = ()
        self.changes = False  # whether any hook changes the gradient
        self.leaf_hooks = LeafHooks(clock)
        self.is_simple = True  # whether the hooks can act on each gradient alone, without an alias or the output

    def schedule(self, attached_hooks: Sequence[AttachedHook]) -> None:
        """Set the scheduled hooks, in order."""
        self.attached_hooks = attached_hooks
        self.changes = not all(attached.is_record_hook for attached in attached_hooks)
        layout = self.clock.layout
        self.is_simple = (layout is None or not layout.is_model_parallel) and not any(
            attached.site.spec.needs_value or not attached.matches_path("") or _needs_alias(attached)
            for attached in attached_hooks
        )

    def _register_simple(self, output: Any, call: Call) -> bool:
        """Register the hooks on an output that is one plain tensor: no view, no leaf, no input. Return false for others."""
        is_simple = (
            self.is_simple
            and is_plain_float(output)
            and output.requires_grad
            and torch.is_grad_enabled()
            and output.grad_fn is not None
            and output._base is None
            and not call.repeats
            and not (self.changes and (call.versions or {}).get(id(output)) == output._version)
        )
        if is_simple:
            for attached in self.attached_hooks:
                attached.opportunities += 1
            output.register_hook(gradient_hook(self.attached_hooks, "", call, self.clock, set()))
        return is_simple

    def register(self, module: nn.Module, output: Any, call: Call, inputs: tuple[Any, ...]) -> Any:
        """Register hooks for all output tensors. Return that for the caller, which reads the containers in `inputs`; see `map_tensors`."""
        if self._register_simple(output, call):
            return output
        gradients = CallGradients(self.attached_hooks, call, self.clock, inputs)
        needs_alias = any(map(_needs_alias, gradients.attached_hooks))
        output = gradients.register_outputs(output, call.versions or {}, self.leaf_hooks, needs_alias=needs_alias)
        gradients.finish_registration()
        missing_is_expected = (
            not gradients.expected_paths
            and next(module.parameters(), None) is None
            and not any(tensor.requires_grad for _, tensor in iter_tensors(inputs))
        )
        gradients.count_opportunities(missing_is_expected=missing_is_expected)
        return output


def _needs_alias(attached: AttachedHook) -> bool:
    """Return whether a hook changes a gradient before operations in the module get it."""
    return not attached.is_record_hook and attached.site.spec.kind == "full_backward_pre"


def _writes_to_its_input(module: nn.Module) -> bool:
    """Return whether a module works in place. Disabled dropout returns its input unchanged."""
    is_disabled = isinstance(module, _DropoutNd) and not (module.training and module.p)
    return getattr(module, "inplace", False) is True and not is_disabled
