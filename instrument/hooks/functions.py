"""Kinds `function` and `function_grad`: the torch functions that a module calls.

Two hooks on the module start and end a `FunctionMode` (`instrument.plan.function_calls`), so that other modules pay nothing.
Activation checkpointing runs these hooks again. The functions that hooks of this package call are not observed.

An intervention on the result of an in-place function must change the tensor for all code that holds it. The function runs on
a copy of its first argument, since a change of its own result would invalidate the values that it saved for the backward
pass. The changed result is then written to the argument.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling, is_dynamo_compiling

from ..actions.intervention import describe
from ..config.base import HookBase, ObservationSpec
from ..errors import HookError
from ..plan.attention_weights import attention_of
from ..plan.function_calls import (
    RESHAPING,
    FunctionMode,
    Owner,
    module_frame,
    needs_pause,
    register_pauses,
    written_tensor,
)
from ..runtime.lazy_compiler import exclude_from_graphs, has_compiled, is_compiled_module, run_outside_of_graphs
from ..runtime.own_operations import unseen_by_checkpoint
from ..stats.cpu_kernel import is_connected
from ..stats.flatten import unreadable
from ..tables.kinds import ATTENTION_ROLES
from ..tables.reasons import (
    COMPILED,
    FAST_PATH,
    NO_ATTENTION,
    NO_FUNCTION,
    NO_TENSOR,
    NO_VISIBLE_FUNCTION,
    NOT_ATTENTION,
    PARTLY_COMPILED,
    RAISED,
    TRANSFORMED,
)
from ..values.dtensor import sharding_hooks
from ..values.nested import iter_tensors, join_arguments, map_tensors, split_arguments
from .attached_hook import AttachedHook
from .clock import Clock
from .compiled_hooks import export_refusal
from .gradient_hooks import LeafHooks, versions_of
from .hook_group import InertWhenCopied, SuspendableModuleHooks
from .module_calls import Call, Calls, current_segment
from .module_hooks import ModuleHooks
from .plain_calls import FunctionCall, FunctionCalls, FunctionObserver, current_transform, is_tracing
from .tensor_gradients import CallGradients

_UNMEASURED = nullcontext()


class HookedModule(FunctionCall):
    """A call of a module whose functions are hooked. Its observers are the scheduled hooks."""

    __slots__ = ()

    @property
    def call(self) -> Call:
        call: Call | None = self.given_call
        if call is None:
            index = self.firing.call
            call = self.given_call = Call(index, index, self.leaf_hooks.clock.micro_step_index)
        return call

    def update_coverage(self, *, has_raised: bool = False) -> None:
        """End the call: count an opportunity for each hook whose functions were called, and the firing or the reason."""
        for attached in () if self.firing.recompute else self.observers.values():
            gradients = self.gradients.get(attached)
            if self.called.get(attached):
                attached.opportunities += 1
                attached.firings += 1
            elif gradients is not None:
                gradients.count_opportunities(missing_is_expected=True)
            elif attached in self.called or has_raised:
                attached.count_missed_opportunity(self.obstacles.get(attached, RAISED if has_raised else NO_TENSOR))
            elif attached in self.compiled:
                attached.count_missed_opportunity(PARTLY_COMPILED)
            else:
                no_function = NO_VISIBLE_FUNCTION if has_compiled() else NO_FUNCTION
                no_function = NO_ATTENTION if attached.role in ATTENTION_ROLES else no_function
                attached.count_exempt(self.obstacles.get(attached) or self.pause_reason or no_function)


class HookedFunctions(FunctionMode):
    """The hooks on the functions that one thread calls."""

    def __init__(self, specs: Sequence[HookBase], clock: Clock) -> None:
        # The mode of another probe sees what these functions call.
        of_this_mode = (
            *(HookedFunctions._act, HookedFunctions._observe_attention, HookedFunctions._register),
            *(_copy_of, _write, _overwrite),
        )
        super().__init__(specs, (ModuleHooks.before, ModuleHooks.after, *of_this_mode, *sharding_hooks()))
        self._clock = clock
        self._has_interventions = not all(isinstance(spec, ObservationSpec) for spec in specs)
        if is_connected:
            code = self.is_compiled_code
            self.observe = FunctionObserver(self, self.known, self.running, code, self.observe, self._record)  # type: ignore[method-assign, assignment]

    def run(
        self, function: Any, name: str, owners: Sequence[Owner], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call a function between the hooks on its arguments and those on its result."""
        if self._clock.closed:
            return function(*args, **kwargs)
        by_role = self._acting(owners)
        inputs, outputs, gradients = by_role.get("input", ()), by_role.get("output", ()), by_role.get("grad_output", ())
        changing = []
        if self._has_interventions:
            changing = [owner for owner in (*inputs, *outputs) if not owner.observer.is_record_hook]
        if changing:
            _check_segment(changing[0])
        written = written_tensor(function, name, args, kwargs) if changing or gradients else None
        target = written if changing and any(_selects_argument(owner, args, kwargs) for owner in changing) else None
        if target is not None:
            args = (_copy_of(target), *args[1:])
        if inputs:
            args, kwargs = split_arguments(self._act(inputs, join_arguments(args, kwargs)), len(args))
        if target is not None and name in RESHAPING:
            args = (_write(target, args[0]), *args[1:])
        versions = versions_of(tensor for _, tensor in iter_tensors((args, kwargs))) if gradients else {}
        result = function(*args, **kwargs)
        if not by_role.keys().isdisjoint(ATTENTION_ROLES):
            self._observe_attention(by_role, name, args, kwargs, result)
        new = _result_of(function, name, args, kwargs, result)
        if target is not None:
            new = _write(target, self._act(outputs, _copy_of(target) if name in RESHAPING else new))
        elif outputs:
            changed = self._act(outputs, new)
            new = changed if changed is new or kwargs.get("out") is None else _overwrite(result, changed)
        if gradients:
            new = self._register(gradients, new, versions, needs_alias=written is None)
        return None if result is None else new

    def _record(
        self,
        function: Any,
        name: str,
        owners: Sequence[Owner],
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None,
        result: Any,
    ) -> None:
        """Run record hooks on the result of a function that was called."""
        self._act(owners, _result_of(function, name, args, kwargs or {}, result))

    def _acting(self, owners: Sequence[Owner]) -> Mapping[str, Sequence[Owner]]:
        """Return the hooks that act in a call, by role. Those on attention count as called if the function computes attention."""
        is_transformed = current_transform() is not None
        by_role: dict[str, list[Owner]] = {}
        for owner in owners:
            running, attached, _ = owner
            if is_transformed or attached.role not in ATTENTION_ROLES:
                running.called.setdefault(attached, False)
            if is_transformed:
                running.obstacles[attached] = TRANSFORMED
            elif not (
                running.firing.recompute and attached.is_record_hook and not attached.site.spec.definition.gradient
            ):
                by_role.setdefault(attached.role, []).append(owner)
        return by_role

    def _act(self, owners: Sequence[Owner], value: Any) -> Any:
        """Run hooks on every tensor of the arguments or the result of a function."""

        def act(path: str, tensor: Tensor) -> Tensor:
            for running, attached, function_path in owners:
                full_path = f"{function_path}.{path}" if path else function_path
                if not attached.accepts(tensor, full_path):
                    if not attached.is_record_hook and attached.matches_path(full_path):
                        running.obstacles[attached] = attached.no_tensor_reason(tensor, full_path)
                    continue
                firing = running.firing
                new = None if attached.direct is None else attached.direct(tensor, full_path, firing)
                if new is not None:
                    running.called[attached] = True
                    tensor = new
                    continue
                if (reason := unreadable(tensor)) is not None:
                    running.obstacles[attached] = reason
                    continue
                running.called[attached] = True
                tensor = attached.fire(tensor, full_path, firing)
            return tensor

        if not owners:
            return value
        if type(value) is Tensor and self._clock.timer is None:  # most often
            return act("", value)
        with self._clock.timer or _UNMEASURED:
            return map_tensors(value, act)

    def _observe_attention(
        self,
        by_role: Mapping[str, Sequence[Owner]],
        name: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
    ) -> None:
        """Run record hooks on the attention weights and the scores of a function, before hooks change its result."""
        with self._clock.timer or _UNMEASURED:
            with unseen_by_checkpoint():
                found = attention_of(name, args, kwargs, result)
            for role in ATTENTION_ROLES:
                for running, attached, _ in by_role.get(role, ()):
                    if isinstance(found, str):
                        running.obstacles[attached] = found
                    if found != NOT_ATTENTION:
                        running.called.setdefault(attached, False)
                if not isinstance(found, str):
                    self._act(by_role.get(role, ()), found[role])

    def _register(self, owners: Sequence[Owner], value: Any, versions: Mapping[int, int], *, needs_alias: bool) -> Any:
        """Register hooks on the gradients of the result of a function. Return the result for the caller.

        With aliases, the gradient reaches the hook that was registered last first.
        """
        needs_alias = needs_alias and any(not owner.observer.is_record_hook for owner in owners)
        with self._clock.timer or _UNMEASURED:
            for running, attached, path in reversed(owners) if needs_alias else owners:
                gradients = running.gradients.get(attached)
                if gradients is None:
                    gradients = running.gradients[attached] = CallGradients([attached], running.call, self._clock)
                gradients.registered.clear()
                gradients.aliases.clear()
                value = gradients.register_outputs(
                    value, versions, running.leaf_hooks, needs_alias=needs_alias, root=path
                )
            for running, attached, _ in owners:
                running.gradients[attached].finish_registration()
        return value


class FunctionHooks(SuspendableModuleHooks):
    """The sites of the function kinds at one module."""

    early = True
    plain_calls: FunctionCalls | None = None  # starts and ends calls without Python code

    def __init__(
        self, attached_hooks: Sequence[AttachedHook], calls: Calls, threads: FunctionThreads, *, suspend: bool
    ) -> None:
        only_values = all(each.is_record_hook and not each.site.spec.definition.gradient for each in attached_hooks)
        super().__init__(attached_hooks, calls, suspend=suspend, note_inputs=not only_values)
        self.threads = threads
        self.leaf_hooks = LeafHooks(self.clock)
        self.scheduled: dict[str, AttachedHook] = {}
        self._acts_in_all_calls = True

    def attach(self) -> None:
        self.hooks.add(self.module.register_forward_pre_hook(MethodType(FunctionHooks.before, self)))
        after = MethodType(FunctionHooks.after, self)
        self.hooks.add(self.module.register_forward_hook(after, prepend=True, always_call=True))

    def refresh(self) -> None:
        self.scheduled = {each.site.spec.name: each for each in self.attached_hooks if each.is_scheduled}
        self._acts_in_all_calls = all(each.calls is None for each in self.scheduled.values())
        super().refresh()
        self.plain_calls = None
        if is_connected and self.active and self._acts_in_all_calls and self.clock.timer is None:
            shared = self.calls.indices, self.calls.is_shared, self.threads, self.calls
            self.plain_calls = FunctionCalls(self.clock, *shared, HookedModule, self.scheduled, self.leaf_hooks)

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """The forward pre hook."""
        plain_calls = None if is_compiling() or self.plain_calls is None or self.unscheduled else self.plain_calls
        if plain_calls is None or not plain_calls.enter(self, args):
            _enter(self, module, args)

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """The forward hook."""
        if is_dynamo_compiling() or self.plain_calls is None or not self.plain_calls.leave(self):
            _leave(self, module, args, output)

    def enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG002
        """Start to observe functions."""
        if is_tracing():
            self._check_export()
            return
        if not self._is_active():
            return
        if current_transform() is not None:
            self.count_missed_call(TRANSFORMED)
            return
        with self.clock.timer or _UNMEASURED:
            frame, _ = module_frame()
            if frame is not None:
                call = self.calls.enter(self, args)
                acting = self.scheduled
                if not self._acts_in_all_calls:
                    acting = {name: each for name, each in acting.items() if each.acts_in(call.index)}
                self.threads.mode.enter(HookedModule(frame, acting, self.leaf_hooks, call, call.firing()))

    def enter_compiled(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG002
        """Count a call in compiled code, which calls no functions."""
        if is_compiling():  # torch.export runs this code
            self._check_export()
        elif self._is_active():
            self.count_missed_call(COMPILED)

    def _check_export(self) -> None:
        if not self.clock.closed and (refusal := export_refusal(self.attached_hooks)):
            raise HookError(refusal)

    def _is_active(self) -> bool:
        """Return whether a site is scheduled. Count the sites that are not."""
        if self.clock.closed:
            return False
        self.count_unscheduled()
        if not self.active:
            self.suspend()
        return self.active

    def leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        """End the observation, also after an exception."""
        if not self.attached_hooks:  # copied with the module
            return
        with self.clock.timer or _UNMEASURED:
            frame, has_raised = module_frame()
            running = self.threads.mode.leave(frame)
            if self.clock.closed:
                self.detach()
            elif isinstance(running, HookedModule):
                self.calls.leave(self)
                running.update_coverage(has_raised=has_raised)

    def detach(self) -> None:
        """Remove all hooks, and the mode of this thread. If a thread is in a call of a module, its end removes the module hooks."""
        self.leaf_hooks.release()
        self.threads.mode.leave_all()
        if not self.threads.are_observed_by(self.attached_hooks):
            super().detach()

    def suspend(self) -> None:
        """Suspend the hooks, unless they have to end the mode of a thread."""
        if not self.threads.are_observed_by(self.attached_hooks):
            super().suspend()


_enter = exclude_from_graphs(FunctionHooks.enter, FunctionHooks.enter_compiled)
_leave = exclude_from_graphs(FunctionHooks.leave)
for _hook in (FunctionHooks.before, FunctionHooks.after):
    run_outside_of_graphs(_hook, with_calls=False)


class FunctionPauses(InertWhenCopied):
    """The hooks that pause the modes of all threads in modules whose result a mode would change.

    They are never suspended: an encoder layer without hooks takes PyTorch's fast path, which rounds differently.
    """

    def __init__(self, modules: Iterable[nn.Module], clock: Clock, threads: FunctionThreads) -> None:
        super().__init__((), clock)
        self.modules = modules
        self.threads = threads

    def attach(self) -> None:
        hooks = (FunctionPauses.pause, FunctionPauses.end, FunctionPauses.resume)
        pause, end, resume = (MethodType(hook, self) for hook in hooks)
        self.handles.extend(register_pauses(self.modules, pause, end, resume))

    def pause(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The forward pre hook of a module that may need a pause."""
        if is_compiling() or self.clock.closed or not self.threads.mode.running:
            return
        if (frame := module_frame()[0]) is not None and needs_pause(module, args, kwargs):
            self.threads.mode.pause(frame, PARTLY_COMPILED if is_compiled_module(module) else FAST_PATH)

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:  # noqa: ARG002
        """The forward hook of this module."""
        if not (is_compiling() or self.clock.closed):
            self.threads.mode.leave(module_frame()[0], is_paused=True)

    def resume(self, module: nn.Module, args: tuple[Any, ...]) -> None:  # noqa: ARG002
        """The forward pre hook of the first layer of an encoder."""
        if not (is_compiling() or self.clock.closed):
            self.threads.mode.resume()


class FunctionThreads(threading.local):
    """The attribute `mode` is the mode of this thread: PyTorch's stack of modes belongs to a thread. `modes` are those of all threads."""

    def __init__(self, specs: Sequence[HookBase], clock: Clock, modes: dict[int, HookedFunctions]) -> None:
        self.mode, self.modes = HookedFunctions(specs, clock), modes
        modes[threading.get_ident()] = self.mode

    def are_observed_by(self, attached_hooks: Sequence[AttachedHook]) -> bool:
        """Whether any thread is in a call of a module with these hooks, whose forward hook then removes the mode."""
        return any(mode.is_observed_by(attached_hooks) for mode in list(self.modes.values()))


def _result_of(function: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], result: Any) -> Any:
    """Return the result of a function; the changed tensor if it returns none, as `x[i] = y` does."""
    is_written = result is None and written_tensor(function, name, args, kwargs) is not None
    return args[0] if is_written else result


def _selects_argument(owner: Owner, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an intervention may change this call of an in-place function, whose result is one tensor."""
    path = owner.path
    attached: AttachedHook = owner.observer
    if attached.role == "output":
        return attached.matches_path(path)
    return any(attached.matches_path(each) for each, _ in iter_tensors(join_arguments(args, kwargs), path))


def _check_segment(owner: Owner) -> None:
    """Raise `HookError` for an intervention in a checkpoint segment that starts in the module: it would not be repeated."""
    running, attached, path = owner
    if current_segment() is not running.call.segment:
        context = attached.context(path, running.firing)
        raise HookError(
            f"{describe(context)} changes a function inside an activation checkpoint that this module starts; the "
            "recomputation would run without the change. Hook the module that the checkpoint runs instead"
        )


def _copy_of(tensor: Tensor) -> Tensor:
    return tensor.clone()


def _write(target: Tensor, value: Tensor) -> Tensor:
    """Write a value to a tensor in place, as part of the graph, and return the tensor."""
    return target.copy_(value)


def _overwrite(result: Any, new: Any) -> Any:
    """Write changed values to the tensors of a result, which were passed as `out`. They are not part of a graph."""
    values = dict(iter_tensors(new))
    with torch.no_grad():
        return map_tensors(result, lambda path, tensor: tensor.copy_(values[path]))
