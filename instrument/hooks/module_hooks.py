"""Kinds on a module's tensors: forward_pre, forward, full_backward_pre, full_backward, tensor.

One pre hook and one hook on the module serve all sites, so that several specs run in the order of the configuration.
Gradients come from hooks on the tensors (`instrument.hooks.tensor_gradients`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling

from ..errors import HookError
from ..runtime.lazy_compiler import exclude_from_graphs, run_outside_of_graphs
from ..stats.cpu_kernel import is_connected
from ..stats.flatten import unreadable
from ..stats.portable import float32_or_wider
from ..tables.reasons import NO_ARGUMENTS, NO_CHANGE, NO_TENSOR, REPLACED_INPUT, TRANSFORMED
from ..values.containers import copied_containers, write_back
from ..values.nested import iter_tensors, join_arguments, returned_value, split_arguments
from .attached_hook import AttachedHook, act_on_tensors
from .compiled_hooks import GraphHooks, Places
from .gradient_hooks import versions_of
from .hook_group import InertWhenCopied, SuspendableModuleHooks
from .module_calls import Call, Calls
from .plain_calls import PlainCalls, Recording, current_transform, firing_of, is_tracing
from .tensor_gradients import InputGradients, OutputGradients, finish_gradient

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_FORWARD = ("forward_pre", "forward")
MAX_COMPOSED = 8  # combinations of scheduled hooks that are kept


class ModuleHooks(SuspendableModuleHooks):
    """All sites at one module, served by two hooks.

    They are not suspended if they were prepended, or if any code was compiled: compiled code calls only the hooks that were
    registered when it was compiled.

    Args:
        prepend: Whether the hooks run before those that are registered already.
        always_call: Whether the forward hook also runs if the forward pass raises an exception.
        early: Whether the forward hook runs before those of other code that are registered already.
    """

    plain_calls: PlainCalls | None = None  # runs calls that need no Python code

    def __init__(
        self,
        attached_hooks: Sequence[AttachedHook],
        calls: Calls,
        *,
        prepend: bool = False,
        always_call: bool = False,
        suspend: bool = True,
        early: bool = False,
    ) -> None:
        # Hooks that only record inputs and outputs need not know which calls have the same random numbers or graph.
        only_values = all(each.is_record_hook and each.site.spec.kind in _FORWARD for each in attached_hooks)
        super().__init__(attached_hooks, calls, suspend=suspend and not prepend, note_inputs=not only_values)
        self.prepend = prepend
        self.always_call = always_call
        self.early = early
        self.pre: list[AttachedHook] = []
        self.forward_input: list[AttachedHook] = []
        self.output: Sequence[AttachedHook] = []
        self.changes: list[AttachedHook] = []
        self.graph = GraphHooks(attached_hooks, calls)
        self.input_gradients = InputGradients(self.clock)
        self.output_gradients = OutputGradients(self.clock)
        # Where the scheduled sites act, and what runs the calls, by what each site does with plain tensors (False: it is not scheduled).
        self._composed: dict[tuple[object, ...], tuple[Places, PlainCalls | None]] = {}

    def attach(self) -> None:
        before, after = self._bound(ModuleHooks.before), self._bound(ModuleHooks.after)
        options: dict[str, bool] = {"prepend": self.prepend, "with_kwargs": True}
        self.hooks.add(self.module.register_forward_pre_hook(before, **options))
        self.hooks.add(self.module.register_forward_hook(after, **options, always_call=self.always_call))
        if self.early:
            registered = cast("OrderedDict[int, Callable[..., Any]]", self.module._forward_hooks)
            others = list(registered.items())[:-1]
            first = max((index for index, (_, hook) in enumerate(others, 1) if _stays_before(hook)), default=0)
            for each, _ in others[first:]:
                registered.move_to_end(each)

    def _bound(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of this object. A copied model gets that of the copied object."""
        return MethodType(hook if self.graph.obstacle is None else exclude_from_graphs(hook), self)

    def refresh(self) -> None:
        """Sort the scheduled sites by where they act."""
        scheduled = [attached for attached in self.attached_hooks if attached.is_scheduled]
        key = tuple(attached.is_scheduled and attached.direct for attached in self.attached_hooks)
        places = self._composed[key][0] if key in self._composed else Places.of(scheduled)
        self.graph.refresh()
        super().refresh()
        self.pre, self.forward_input, self.output, gradients, contributions, totals, self.changes = places
        self.output_gradients.schedule(gradients)
        self.input_gradients.contribution_hooks, self.input_gradients.total_hooks = contributions, totals
        if key not in self._composed:
            if len(self._composed) >= MAX_COMPOSED:
                self._composed.clear()
            self._composed[key] = places, self._compose_plain_calls(*places)
        self.plain_calls = self._composed[key][1]

    def _compose_plain_calls(self, *places: Sequence[AttachedHook]) -> PlainCalls | None:
        """Return what runs the calls that need no Python code; None if every call needs some."""
        gradients = self.output_gradients.attached_hooks
        outputs = [each.direct for each in self.output if each.direct is not None]
        recordings = [each.direct for each in gradients if isinstance(each.direct, Recording)]
        if (
            not (self.active and self.output_gradients.is_simple)
            or len(outputs) + len(recordings) < sum(map(len, places))
            or self.calls.is_shared
            or self.clock.timer is not None
            or not is_connected
        ):
            return None
        finish = partial(finish_gradient, gradients, self.clock)
        counts = tuple(self.output)
        return PlainCalls(self.clock, self.calls.indices, tuple(outputs), counts, tuple(recordings), finish)

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None
    ) -> Arguments | None:
        """The forward pre hook: runs the hooks on inputs and registers hooks for their gradients."""
        if is_dynamo_compiling() or kwargs is None:  # None: torch.ao.quantization has registered it on another module
            return (
                self.graph.trace_before(module, args, kwargs) if kwargs is not None and self.clock.in_graphs else None
            )
        if not self.clock.closed and self.graph.refusal and (is_compiling() or is_tracing()):  # an export
            raise HookError(self.graph.refusal)
        if torch.compiler._is_exporting_flag:  # the tensors have no values
            return None
        if self.plain_calls is not None and not self.unscheduled and self.plain_calls.enter():
            return None
        if self.clock.closed or is_tracing():
            return None
        if self.unscheduled:
            self.count_unscheduled()
        if not self.active:
            self.suspend()
            return None
        if (timer := self.clock.timer) is not None and not timer.is_running:
            with timer:  # run again, measured
                return self.before(module, args, kwargs)
        if current_transform() is not None:
            self.count_missed_call(TRANSFORMED)
            return None
        call = self.calls.enter(self, (*args, *kwargs.values()) if kwargs else args)
        inputs, outputs = self.input_gradients, self.output_gradients
        if not (self.pre or inputs.contribution_hooks or inputs.total_hooks or outputs.changes or self.changes):
            return None
        original = join_arguments(args, kwargs)
        new = self._act(self.pre, original, call) if self.pre else original
        if inputs.contribution_hooks or inputs.total_hooks:
            new = inputs.register(module, new, len(args), call)
        self._note_inputs(new, call)
        if new is original:
            return None
        call.copies = copied_containers(original, new)
        return split_arguments(new, len(args))

    def after(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any, output: Any = ...) -> Any:
        """The forward hook: runs the hooks on outputs and registers hooks for their gradients."""
        if is_dynamo_compiling() or output is ...:  # see `before`
            is_traced = output is not ... and self.clock.in_graphs
            return self.graph.trace_after(module, args, kwargs, output) if is_traced else None
        done, new = 0, output  # how many of the hooks on outputs are done, and the output that they leave
        if self.plain_calls is not None:
            left = self.plain_calls.leave(output)
            if type(left) is not tuple:
                return left
            done, new = left
        if (
            self.clock.closed
            or not self.active
            or torch.compiler._is_exporting_flag
            or is_tracing()
            or current_transform() is not None
        ):
            return None
        if (timer := self.clock.timer) is not None and not timer.is_running:
            with timer:  # run again, measured
                return self.after(module, args, kwargs, output)
        if (call := self.calls.leave(self)) is None:  # its start was not seen
            return None
        given = output if type(output) is Tensor else returned_value(output, args, kwargs)
        new = new if done else given
        if call.on_output is not None:
            call.on_output(given)
        if self.forward_input:
            self._act(self.forward_input, join_arguments(args, kwargs), call)
        # The caller reads the containers that it passed, also if the module returns them.
        in_place = (args, kwargs)
        if self.output:
            new = self._act(self.output[done:], new, call, in_place)
        if self.changes and not call.is_recomputed:
            self._observe_change(call, join_arguments(args, kwargs), new)
        if self.output_gradients.attached_hooks:
            new = self.output_gradients.register(module, new, call, in_place)
        if call.copies:
            write_back(call.copies)
        return None if new is given or output is None else new

    def _note_inputs(self, arguments: Any, call: Call) -> None:
        """Note what the hooks on outputs need of the inputs, which the module may overwrite or return."""
        if self.output_gradients.changes:
            call.versions = versions_of(tensor for _, tensor in iter_tensors(arguments))
        acting = (hook for hook in self.changes if hook.calls is None or call.index in hook.calls)
        if not call.is_recomputed and any(acting) and (first := _first_tensor(arguments)[1]) is not None:
            call.first_input = first, first.detach().clone()

    def _act(self, attached_hooks: Sequence[AttachedHook], value: Any, call: Call, in_place: Any = ()) -> Any:
        """Run hooks on every tensor of a value. A recomputed pass writes no rows a second time."""
        firing = firing_of(call.index, 0, call.is_recomputed, call.origin)
        if type(value) is Tensor and not call.is_recomputed:  # most often, it is one plain tensor
            for at, attached in enumerate(attached_hooks):
                new = None if attached.direct is None else attached.direct(value, "", firing)
                if new is None:
                    attached_hooks = attached_hooks[at:]
                    break
                attached.opportunities += 1
                attached.firings += 1
                value = new
            else:
                return value
        attached_hooks = [attached for attached in attached_hooks if attached.acts_in(call.index)]
        acting = [attached for attached in attached_hooks if not call.is_recomputed or not attached.is_record_hook]
        new, fired, obstacles = act_on_tensors(acting, value, firing, in_place)
        if not call.is_recomputed:
            for attached in attached_hooks:
                if attached.role == "input" and attached.is_record_hook and not value:
                    attached.count_exempt(NO_ARGUMENTS)
                    continue
                attached.opportunities += 1
                if attached in fired:
                    attached.firings += 1
                else:
                    attached.count_miss(obstacles.get(attached) or attached.no_tensor_reason(value))
        return new

    def _observe_change(self, call: Call, arguments: Any, output: Any) -> None:
        """Run hooks on the difference of the first tensors of output and input, in float32 or a wider dtype."""
        path, tensor = _first_tensor(output)
        original, given = call.first_input or (None, None)
        change, reason = None, NO_CHANGE
        if original is not _first_tensor(arguments)[1]:
            reason = REPLACED_INPUT
        elif tensor is not None and given is not None and _is_comparable(tensor, given):
            reason = unreadable(tensor) or NO_TENSOR
            if reason == NO_TENSOR:
                wide = torch.promote_types(float32_or_wider(tensor.dtype), float32_or_wider(given.dtype))
                change = tensor.detach().to(wide) - given.to(wide)
        for attached in self.changes:
            if not attached.acts_in(call.index):
                continue
            attached.opportunities += 1
            if change is not None and tensor is not None and attached.matches_path(path):
                firing = firing_of(call.index, 0, False, call.origin)
                attached.note_placement(tensor, path, firing)
                attached.fire(change, path, firing, value=given)
                attached.firings += 1
            else:
                attached.count_miss(reason)

    def detach(self) -> None:
        """Remove both hooks in reverse order, and the hooks on tensors that outlive the graph."""
        super().detach()
        self.input_gradients.leaf_hooks.release()
        self.output_gradients.leaf_hooks.release()


for _hook in (ModuleHooks.before, ModuleHooks.after):
    run_outside_of_graphs(_hook)


def _first_tensor(value: Any) -> tuple[str, Tensor | None]:
    """Return the first tensor of a nested value, and its path; None without any."""
    return next(iter_tensors(value), ("", None))


def _is_comparable(output: Tensor, given: Tensor) -> bool:
    """Return whether the difference of an output and an input exists."""
    is_dense = all(x.is_floating_point() and x.layout == torch.strided and not x.is_nested for x in (output, given))
    shards = [getattr(x, "placements", None) for x in (output, given)]
    return is_dense and output.shape == given.shape and output.device == given.device and shards[0] == shards[1]


def _stays_before(hook: Callable[..., Any]) -> bool:
    """Return whether a hook runs before an early one: it does so too, or it converts the output of a distributed module."""
    other = getattr(hook, "__self__", None)
    if isinstance(other, InertWhenCopied):
        return other.early
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.")
