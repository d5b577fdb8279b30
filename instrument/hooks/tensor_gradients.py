"""Gradients of a module's inputs and outputs, by hooks on the tensors.

The values are bit-identical to those of PyTorch's module hooks. Unlike these, they also work with in-place operations
on the module's input or output (`instrument.hooks.gradient_hooks`).

A tensor that several modules use has one gradient, the sum of all contributions. `grad_input` is the contribution of
one module. To record it, it is computed from the graph (`instrument.hooks.gradient_contribution`); to change it, the module
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

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.weak import WeakTensorKeyDictionary

from ..tables.reasons import NO_OUTPUT_GRAPH, REPEATED_ARGUMENT
from ..values.nested import iter_tensors
from .attached_hook import AttachedHook
from .call_gradients import CallGradients, gradient_hook
from .clock import Clock, graph_task
from .direct import is_plain_float
from .gradient_contribution import (
    Edge,
    ModuleContribution,
    StoredTensors,
    edge_of,
    find_contributions,
    next_sequence_number,
)
from .gradient_hooks import Hook, LeafHook, LeafHooks, TensorGradientHook, ViewBase, ViewRegion
from .module_calls import Call
from .separate_arguments import Inputs, SeparateArguments, repeated_tensors
from .separate_gradients import SeparateGradients


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
        returned = {
            id(part) for _, tensor in iter_tensors(output) for part in (tensor, tensor._base) if part is not None
        }
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
                pending.aliases.append((alias, TensorGradientHook(alias, hook)))
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
