"""The hooks of one group on a module inside graphs of `torch.compile`: `trace_before` and `trace_after` are traced, and the operators call
`begin`, `end` and `run` at run time.

A graph contains the operators of all hooks, scheduled or not, so that a schedule never causes a compilation. While no hook on any
module is scheduled, another graph without operators runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..actions.base import UNKNOWN_CALL
from ..config.hook_specs import graph_obstacle
from ..stats.flatten import unreadable
from ..tables.reasons import INFERENCE, NO_GRAD, NO_GRAPH, NO_INPUT_GRAPH
from ..values.nested import join_arguments, split_arguments
from .attached_hook import AttachedHook
from .clock import FiringIndex
from .compiled_operators import (
    SEPARATOR,
    GraphCall,
    Stage,
    begin_call,
    end_call,
    has_shards,
    has_unknown,
    has_writable,
    new_token,
    tensors_in,
    traced_call,
    why_no_gradient,
)
from .module_calls import Call, Calls

# Reasons for graph breaks. The hooks then run outside of the graph.
MAX_CALLS = 1024  # of a micro-step that a backward pass may repeat
WRITES_TO_INPUT = "the module may write to its arguments, which hooks of instrument would replace"
UNKNOWN_CONTAINER = (
    "the output is a dataclass that torch.utils._pytree does not know: register it with register_dataclass"
)
SHARDED = "hooks of instrument on a DTensor run outside of graphs"


def export_refusal(attached_hooks: Sequence[AttachedHook]) -> str:
    """Return why an export is refused: the program would not include an intervention. Empty if none is scheduled."""
    for attached in attached_hooks:
        if attached.is_scheduled and not attached.is_record_hook:
            name, kind, label = attached.site.spec.name, attached.site.spec.kind, attached.site.label
            fix = "export the model after the block of attach, or remove the hook"
            return f"hook {name!r} ({kind}) on layer {label!r}: torch.export and torch.jit.trace cannot include an intervention; {fix}"
    return ""


class Places(NamedTuple):
    """The sites at a module by the tensors on which they act, in order."""

    pre: list[AttachedHook]  # inputs before the forward pass
    forward_input: list[AttachedHook]  # inputs after it
    output: list[AttachedHook]  # outputs
    # Gradients of outputs. Those that can change an incoming gradient precede those that record it.
    output_gradients: list[AttachedHook]
    contributions: list[AttachedHook]  # the contributions of the module to the gradients of its inputs
    totals: list[AttachedHook]  # the gradients of the inputs
    changes: list[AttachedHook]  # differences of outputs and inputs

    @classmethod
    def of(cls, attached_hooks: Sequence[AttachedHook]) -> Places:
        def at(*places: tuple[str, str | None]) -> list[AttachedHook]:
            return [
                attached
                for attached in attached_hooks
                for kind, role in places
                if attached.site.spec.kind == kind and role in (None, attached.site.spec.tensor_role)
            ]

        return cls(
            at(("forward_pre", None)),
            at(("forward", "input")),
            at(("forward", "output")),
            at(("full_backward_pre", None), ("tensor", "output")) + at(("full_backward", "grad_output")),
            at(("full_backward", "grad_input")),
            at(("tensor", "input")),
            at(("forward", "change")),
        )


class GraphHooks:
    """The hooks of one group."""

    def __init__(self, attached_hooks: Sequence[AttachedHook], calls: Calls) -> None:
        self.clock = calls.clock
        self.calls = calls
        self.token = new_token(self)
        self._places = places = Places.of(attached_hooks)
        self._stages: list[list[AttachedHook]] = []
        stages = [self._stages_of(place) for place in places[:-2]]
        self.pre, self.forward_input, self.output, self.output_gradients, self.contributions = stages
        self.replaces_inputs = bool(self.contributions) or any(stage.changes for stage in self.pre)
        self._first_gradient_stage = sum(map(len, stages[:3]))
        module = attached_hooks[0].site.layer.module
        of_torch = type(module).__module__.startswith("torch.nn.modules.") and "forward" not in vars(module)
        self._acts_before = bool(self.pre or self.contributions)
        self._is_simple_module = of_torch and not module._modules
        self.refresh()
        # Why the hooks cannot be part of a graph; None if they can.
        self.obstacle = next(filter(None, (graph_obstacle(attached.site.spec) for attached in attached_hooks)), None)
        self._micro_step_index = -1
        # The micro-step, the call and, if the call is unknown, the gradient at which a site fired last.
        self._fired: dict[AttachedHook, tuple[int, int, int]] = {}
        self._traced: dict[tuple[int, int], int] = {}  # the indices of the calls of a micro-step, see `begin`
        self._arrived: Counter[tuple[int, int, str]] = Counter()  # gradients, by stage, call and path

    def _stages_of(self, attached_hooks: Sequence[AttachedHook]) -> tuple[Stage, ...]:
        stages = []
        for is_record_hook, group in groupby(attached_hooks, lambda attached: attached.is_record_hook):
            members = list(group)
            needs_owner = any(attached.site.spec.needs_value for attached in members)
            stages.append(Stage(len(self._stages), not is_record_hook, needs_owner))
            self._stages.append(members)
        return tuple(stages)

    def refresh(self) -> None:
        """Update after the schedule has changed, or other hook groups of the module were added."""
        self.refusal = export_refusal([attached for stage in self._stages for attached in stage] + self._places.totals)
        # One operator then stands for the complete call. A module that may call itself needs both: the outer call has the first index.
        self.needs_begin = self._acts_before or self.calls.is_shared or not self._is_simple_module

    def _needs_begin(self, module: nn.Module) -> bool:
        """Return whether a call has an operator for its start, in traced code. Hooks of other code may call the module again."""
        return self.needs_begin or len(module._forward_hooks) + len(module._forward_pre_hooks) > 2

    def trace_before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Call the operators before the forward pass, in traced code. Return the arguments that replace these."""
        # In graphs of PyTorch 2.10 and 2.11, `torch.compiler.is_exporting()` is always true.
        if torch.compiler._is_exporting_flag and self.refusal:
            torch._dynamo.graph_break(msg=self.refusal)
        if torch.compiler._is_exporting_flag or not self._needs_begin(module):
            return None
        given = join_arguments(args, kwargs)
        if self.replaces_inputs and (getattr(module, "inplace", False) is True or has_writable((*given.values(),))):
            torch._dynamo.graph_break(msg=WRITES_TO_INPUT)
        if self._acts_before and has_shards(given):
            torch._dynamo.graph_break(msg=SHARDED)
        missing = why_no_gradient(given, is_data=True) if self.contributions else ""
        call = begin_call(self.token, missing)
        new = traced_call(given, call, self.token, self.pre, self.contributions)
        return None if new is None else split_arguments(new, len(args))

    def trace_after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Call the operators after the forward pass, in traced code. Return the output that replaces this one."""
        if torch.compiler._is_exporting_flag:
            return None
        missing = ""
        given = (*args, *kwargs.values())
        acts_after = bool(self.output or self.output_gradients)
        if acts_after:
            if (output is None or has_writable(output)) and has_writable(given):
                torch._dynamo.graph_break(msg=WRITES_TO_INPUT)
            if has_unknown(output):
                torch._dynamo.graph_break(msg=UNKNOWN_CONTAINER)
        if has_shards(given if self.forward_input else ()) or (acts_after and has_shards(output)):
            torch._dynamo.graph_break(msg=SHARDED)
        if self.output_gradients:
            is_data = bool(why_no_gradient((args, kwargs), is_data=True)) and not [*module.parameters()]
            missing = why_no_gradient(output, is_data=is_data)
        observes = bool(self.output) and not (self.output[0].changes or self.forward_input)
        call = end_call(
            output, self.token, missing, not self._needs_begin(module), self.output[0] if observes else None
        )
        if self.forward_input:
            traced_call(join_arguments(args, kwargs), call, self.token, self.forward_input, ())
        stages = self.output[1:] if observes else self.output
        return traced_call(output, call, self.token, stages, self.output_gradients, tensors_in(given))

    def begin(self, missing: str, traced: tuple[int, int]) -> GraphCall:
        """Start a call of the module.

        Args:
            missing: Why no input gets a gradient; empty if one does.
            traced: The numbers of the run of the graph, and of the call in the graph. A recomputed call has those of the original one.
        """
        call = self.calls.enter(self, in_graph=True)
        if self.calls.indices.micro_step_index != self._micro_step_index:
            self._micro_step_index = self.calls.indices.micro_step_index
            self._arrived.clear()
            self._traced.clear()
        if not call.is_recomputed:
            self._traced[traced] = call.index
            if len(self._traced) > MAX_CALLS:  # as in a loop under no_grad without steps
                del self._traced[next(iter(self._traced))]
        elif call.origin == UNKNOWN_CALL:
            call.index = call.origin = self._traced.get(traced, UNKNOWN_CALL)
        self._count_opportunities(self._places.pre, call)
        self._count_gradients(self._places.contributions, call, missing)
        return GraphCall(call.index, call.origin, call.is_recomputed, call.micro_step_index)

    def end(self, missing: str, begins: bool, traced: tuple[int, int]) -> GraphCall:
        """End the forward pass of a call.

        Args:
            missing: Why no output gets a gradient; empty if one does.
            begins: Whether the call starts here too, since no hook needs its start.
            traced: See `begin`, if the call starts here.
        """
        if begins:
            self.begin("", traced)
        call = self.calls.leave(self, in_graph=True)
        if call is None:  # its start was not seen
            return GraphCall()
        self._count_opportunities(self._places.forward_input, call)
        self._count_opportunities(self._places.output, call)
        self._count_gradients(self._places.output_gradients, call, missing)
        return GraphCall(call.index, call.origin, call.is_recomputed, call.micro_step_index)

    def _count_opportunities(self, attached_hooks: Sequence[AttachedHook], call: Call) -> None:
        for attached in attached_hooks:
            if not attached.is_scheduled:
                attached.count_unscheduled()
            elif not call.is_recomputed and attached.acts_in(call.index):
                attached.opportunities += 1

    def _count_gradients(self, attached_hooks: Sequence[AttachedHook], call: Call, missing: str) -> None:
        if missing == NO_GRAD and torch.is_inference_mode_enabled():  # tracing this would break the graph
            missing = INFERENCE
        for attached in attached_hooks:
            if not attached.is_scheduled:
                attached.count_unscheduled()
            elif call.repeats:
                pass
            elif missing == NO_INPUT_GRAPH and attached.is_record_hook:
                attached.count_exempt(missing)
            else:
                attached.opportunities += 1
                if missing:
                    attached.count_miss(NO_GRAPH if missing == NO_INPUT_GRAPH else missing)

    def run(
        self, stage: int, value: Tensor, call: GraphCall, path: str, owner: Tensor | None
    ) -> tuple[Tensor, list[bool]]:
        """Run the hooks of a stage on a tensor. Return the tensor that replaces it, and which hooks acted.

        Each hook gets the first of the paths that it selects.
        """
        acted = [False] * len(self._stages[stage])
        if self.clock.closed:
            return value, acted
        is_gradient = stage >= self._first_gradient_stage
        firing = FiringIndex(call.number, 0, call.is_recomputed, call.origin)
        if is_gradient:
            index = call.origin if call.is_recomputed else call.number  # the gradient belongs to the original pass
            firing = FiringIndex(index, self._arrived[stage, index, path], False, index)
            self._arrived[stage, index, path] += 1
        with self.clock.timer or nullcontext():
            for index, attached in enumerate(self._stages[stage]):
                own = next((each for each in path.split(SEPARATOR) if attached.matches_path(each)), None)
                if own is None or not (attached.is_scheduled and (is_gradient or attached.accepts(value, own))):
                    continue
                if not attached.acts_in(firing.call) or (firing.recompute and attached.is_record_hook):
                    continue
                new = None if attached.direct is None else attached.direct(value, own, firing)
                if new is None:
                    if (reason := unreadable(value)) is not None:
                        attached.count_miss(reason)
                        continue
                    new = attached.fire(value, own, firing, value=owner)
                at = call.micro_step_index, firing.call, firing.backward if firing.call == UNKNOWN_CALL else 0
                if not firing.recompute and self._fired.get(attached) != at:
                    self._fired[attached] = at
                    attached.firings += 1
                value = new
                acted[index] = True
        return value, acted

    def differentiate(
        self, stage: int, gradient: Tensor, value: Tensor, acted: Sequence[bool], call: GraphCall, path: str
    ) -> Tensor:
        """Return the gradient of the value that hooks of a stage have changed."""
        firing = FiringIndex(call.number, 0, True, call.origin)
        with torch.enable_grad():
            leaf = value.detach().requires_grad_()
            new = leaf
            for attached, has_acted in zip(self._stages[stage], acted, strict=False):
                new = attached.fire(new, path, firing) if has_acted else new
        if new is leaf:
            return gradient
        torch.autograd.backward(new, gradient)  # adds to the gradients of trained tensors that a function uses
        return torch.zeros_like(gradient) if leaf.grad is None else leaf.grad
