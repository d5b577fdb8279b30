"""The hooks of one group on a module inside graphs of `torch.compile`: what the compiler traces, and what runs then.

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

from ..nested import join_arguments, split_arguments
from ..spec.mode_checks import graph_obstacle
from ..stats.flatten import unreadable
from .attached_hook import AttachedHook
from .clock import Clock, Firing
from .graph_operators import OPERATORS, GraphCall, Stage, new_token, traced_call, why_no_gradient
from .module_calls import Call, Calls
from .reasons import NO_GRAPH, NO_INPUT_GRAPH


class Places(NamedTuple):
    """The sites at a module by the tensors on which they act, in order.

    Attributes:
        pre: Inputs before the forward pass.
        forward_input: Inputs after it.
        output: Outputs.
        output_gradients: Gradients of outputs. Those that can change an incoming gradient precede those that record it.
        contributions: The contributions of the module to the gradients of its inputs.
        totals: The gradients of the inputs.
    """

    pre: list[AttachedHook]
    forward_input: list[AttachedHook]
    output: list[AttachedHook]
    output_gradients: list[AttachedHook]
    contributions: list[AttachedHook]
    totals: list[AttachedHook]

    @classmethod
    def of(cls, attached_hooks: Sequence[AttachedHook]) -> Places:
        """Sort sites by where they act."""

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
        )


class GraphHooks:
    """The hooks of one group.

    Args:
        attached_hooks: The sites.
        clock: The clock of the probe.
        calls: The calls of the module.

    Attributes:
        token: The token of the operators.
        obstacle: Why the hooks cannot be part of a graph; None if they can.
    """

    def __init__(self, attached_hooks: Sequence[AttachedHook], clock: Clock, calls: Calls) -> None:
        self.clock = clock
        self.calls = calls
        self.token = new_token(self)
        self._places = places = Places.of(attached_hooks)
        self._stages: list[list[AttachedHook]] = []
        self.pre = self._stages_of(places.pre)
        self.forward_input = self._stages_of(places.forward_input)
        self.output = self._stages_of(places.output)
        self._first_gradient_stage = len(self._stages)
        self.output_gradients = self._stages_of(places.output_gradients)
        self.contributions = self._stages_of(places.contributions)
        self.obstacle = next(filter(None, (graph_obstacle(attached.site.spec) for attached in attached_hooks)), None)
        self._micro_step_index = -1
        self._fired: dict[AttachedHook, tuple[int, int]] = {}  # the micro-step and the call in which a site fired last
        self._arrived: Counter[tuple[int, int, str]] = Counter()  # gradients, by stage, call and path

    def _stages_of(self, attached_hooks: Sequence[AttachedHook]) -> tuple[Stage, ...]:
        stages = []
        for is_record_hook, group in groupby(attached_hooks, lambda attached: attached.is_record_hook):
            members = list(group)
            needs_owner = any(attached.site.spec.needs_value for attached in members)
            stages.append(Stage(len(self._stages), not is_record_hook, needs_owner))
            self._stages.append(members)
        return tuple(stages)

    def trace_before(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Call the operators before the forward pass, in traced code. Return the arguments that replace these."""
        given = join_arguments(args, kwargs)
        missing = why_no_gradient(given, is_data=True) if self.contributions else ""
        call = OPERATORS.begin(self.token, missing)
        new = traced_call(given, call, self.token, self.pre, self.contributions)
        return None if new is None else split_arguments(new, len(args))

    def trace_after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Call the operators after the forward pass, in traced code. Return the output that replaces this one."""
        missing = ""
        if self.output_gradients:
            is_data = bool(why_no_gradient((args, kwargs), is_data=True)) and not [*module.parameters()]
            missing = why_no_gradient(output, is_data=is_data)
        call = OPERATORS.end(self.token, missing)
        if self.forward_input:
            traced_call(join_arguments(args, kwargs), call, self.token, self.forward_input, ())
        return traced_call(output, call, self.token, self.output, self.output_gradients)

    def begin(self, missing: str) -> GraphCall:
        """See `instrument.kinds.graph_operators.Target`."""
        call = self.calls.enter(self, in_graph=True)
        if self.calls.micro_step_index != self._micro_step_index:
            self._micro_step_index = self.calls.micro_step_index
            self._arrived.clear()
        self._count_opportunities(self._places.pre, call)
        self._count_gradients(self._places.contributions, call, missing)
        return GraphCall(call.index, call.origin, call.is_recomputed, call.micro_step_index)

    def end(self, missing: str) -> GraphCall:
        """See `instrument.kinds.graph_operators.Target`."""
        call = self.calls.leave(self)
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
            elif not call.is_recomputed:
                attached.count_opportunity()

    def _count_gradients(self, attached_hooks: Sequence[AttachedHook], call: Call, missing: str) -> None:
        for attached in attached_hooks:
            if not attached.is_scheduled:
                attached.count_unscheduled()
            elif call.repeats:
                pass
            elif missing == NO_INPUT_GRAPH and attached.is_record_hook:
                attached.count_exempt(missing)
            else:
                attached.count_opportunity()
                if missing:
                    attached.count_miss(NO_GRAPH if missing == NO_INPUT_GRAPH else missing)

    def run(self, stage: int, value: Tensor, call: GraphCall, path: str, owner: Tensor | None) -> Tensor:
        """See `instrument.kinds.graph_operators.Target`."""
        if self.clock.closed:
            return value
        is_gradient = stage >= self._first_gradient_stage
        firing = Firing(call.number, 0, call.is_recomputed, call.origin)
        if is_gradient:
            index = call.origin if call.is_recomputed else call.number  # the gradient belongs to the original pass
            firing = Firing(index, self._arrived[stage, index, path], False, index)
            self._arrived[stage, index, path] += 1
        with self.clock.timer or nullcontext():
            for attached in self._due(stage, value, path):
                if firing.recompute and not attached.runs_in_recomputation:
                    continue
                if (reason := unreadable(value)) is not None:
                    attached.count_miss(reason)
                    continue
                at = call.micro_step_index, firing.call
                if not firing.recompute and self._fired.get(attached) != at:
                    self._fired[attached] = at
                    attached.count_firing()
                value = attached.fire(value, path, firing, value=owner)
        return value

    def _due(self, stage: int, value: Tensor, path: str) -> list[AttachedHook]:
        return [attached for attached in self._stages[stage] if attached.is_scheduled and attached.accepts(value, path)]

    def differentiate(self, stage: int, gradient: Tensor, value: Tensor, call: GraphCall, path: str) -> Tensor:
        """See `instrument.kinds.graph_operators.Target`."""
        firing = Firing(call.number, 0, True, call.origin)
        with torch.enable_grad():
            leaf = value.detach().requires_grad_()
            new = leaf
            for attached in () if self.clock.closed else self._due(stage, value, path):
                new = attached.fire(new, path, firing)
        if new is leaf:
            return gradient
        (found,) = torch.autograd.grad(new, leaf, gradient, allow_unused=True)
        return torch.zeros_like(gradient) if found is None else found
