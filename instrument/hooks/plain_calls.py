"""Hooks whose specs have no stage that needs the context of a call, with C code for the calls of modules (`plain_calls.c`).

Stages are: a range of calls, a path in the values, a split dimension, a selected part, a condition, a kept tensor, a shard, a placement
that depends on the tensor, and a gradient scaler if the hook changes gradients or all processes merge its rows. Without stages, recording
is one call of the compiled kernel, and clip and scale are their operation and one more call. `AttachedHook.fire` handles all other tensors
and hooks. If the C code is not built, all calls run Python code.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import count
from types import FrameType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch._C import (
    _get_function_stack_at,
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.utils.checkpoint import _StopRecomputationError

from ..actions.base import Context, Number, Rows, StepContext
from ..actions.clip import Clip
from ..actions.intervention import Intervention, describe, effect_of
from ..actions.record import Record
from ..actions.scale import Scale
from ..errors import HookError, InstrumentError, user_code_location
from ..plan.function_calls import SelectedFunction
from ..stats.cpu_kernel import is_connected
from ..values.nested import structure
from .clock import FIRST_CALL, FiringIndex, graph_task
from .gradient_hooks import LeafHooks, register_at_base

# Of the C extension.
__all__ = [
    "CallIndices",
    "Changing",
    "FiringCounts",
    "FunctionCall",
    "FunctionCalls",
    "FunctionObserver",
    "PlainCalls",
    "Recording",
    "update_counts",
]

current_transform = torch._C._functorch.peek_interpreter_stack
"""Returns the transform of torch.func that runs this code; None without one."""
is_tracing = torch._C._is_tracing
"""Returns whether `torch.jit.trace` runs this code."""
saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""Returns the innermost hooks on saved tensors, None without any. Its argument is `ignore_is_tracing`."""
firing_of = lru_cache(4096)(FiringIndex)
"""Returns a cached `FiringIndex`. It runs no Python code for one that is in the cache."""

try:
    from ..stats.native import (
        CallIndices,
        Changing,
        FiringCounts,
        FunctionCall,
        FunctionCalls,
        FunctionObserver,
        PlainCalls,
        Recording,
        connect_torch,
        update_counts,
    )

    connect_torch(
        current_transform,
        is_tracing,
        graph_task,
        torch.is_grad_enabled,
        saved_tensors_hooks,
        OrderedDict,
        firing_of,
        register_at_base,
        get_eval_frame_callback,
        _len_torch_function_stack,
        _get_function_stack_at,
        _push_on_torch_function_stack,
        _pop_torch_function_stack,
        nn.Module._call_impl.__code__,
    )
# Installed without a C compiler.
except ImportError:

    class FiringCounts:  # type: ignore[no-redef]
        """The opportunities and firings of a site, in the current micro-step and in all earlier ones."""

        __slots__ = ("expected", "fired", "firings", "has_notes", "opportunities")

    def update_counts(counts: list[Any], /) -> list[Any]:
        """Return the counts that have to be updated by other code: all."""
        return counts

    class CallIndices:  # type: ignore[no-redef]
        """The index of the next call of a module; see `plain_calls.c`."""

        is_open = False
        open_micro_step = failed_micro_step = -1

        def __init__(self) -> None:
            self.micro_step_index = self.latest = -1
            self._indices = count()
            self._lock = threading.Lock()

        def start_micro_step(self, micro_step_index: int) -> None:
            """Start at 0 again in another micro-step than before."""
            with self._lock:  # several threads may start the first call of a micro-step
                if self.micro_step_index != micro_step_index:
                    self._indices, self.latest = count(), -1
                    self.micro_step_index = micro_step_index

        def next_index(self) -> int:
            return next(self._indices)

        def end_open_call(self) -> None:
            """Do nothing: no call is open."""

    @dataclass(slots=True, eq=False)
    class FunctionCall:  # type: ignore[no-redef]
        """A call of a module whose functions are hooked; see `HookedModule`."""

        frame: FrameType
        observers: dict[str, AttachedHook]
        leaf_hooks: LeafHooks
        given_call: Any  # a `Call`
        firing: FiringIndex
        counts: dict[SelectedFunction, int] = field(default_factory=dict)
        # The hooks whose functions were called, by code that is not compiled, and whether they fired.
        called: dict[AttachedHook, bool] = field(default_factory=dict)
        obstacles: dict[AttachedHook, str] = field(default_factory=dict)
        gradients: dict[AttachedHook, Any] = field(default_factory=dict)
        compiled: tuple[AttachedHook, ...] = ()
        pause_reason: str | None = None
        is_paused: bool = False
        has_switched_mode: bool = False

    class Recording:  # type: ignore[no-redef]
        """For type checks. It has no objects, and neither have the other classes."""

    PlainCalls = Changing = FunctionCalls = FunctionObserver = Recording  # type: ignore[misc, assignment]


AttachedHook = Any
"""An `instrument.hooks.attached_hook.AttachedHook`, whose module imports this one."""

Given = TypeVar("Given")
Result = TypeVar("Result")
Direct = Callable[[Tensor, str, FiringIndex], Tensor | None]
"""Gets a tensor, its path and the firing. Returns the tensor that replaces it. Returns None, and does nothing, if the tensor is not plain,
or if the scale of its gradient scaler has changed in this step."""


def direct_of(attached: AttachedHook) -> Direct | None:
    """Return what a hook does with a plain tensor; None if its action or its spec needs more."""
    action, spec, clock = attached.action, attached.site.spec, attached.clock
    has_stages = (
        attached.calls is not None
        or attached.selector is not None
        or attached.split_dim is not None
        or attached.condition is not None
        or spec.keep_as is not None
        or not (spec.functions or attached.matches_path(""))
        or (clock.layout is not None and clock.layout.is_model_parallel)
    )
    if has_stages:
        return None
    is_scaled = attached.is_scaled and clock.amp_scale is not None
    if isinstance(action, Record):
        is_plain = action.measurement.is_plain and not (action.tables or action.spec.tensors)
        return _recording(attached, action, is_scaled) if is_plain and action.measurement.unit_dim is None else None
    is_change = isinstance(action, Intervention) and isinstance(action.change, Clip | Scale) and not is_scaled
    return _changing(attached, cast(Intervention, action)) if is_change and spec.definition.family == "module" else None


class _Slots(dict[tuple[str, FiringIndex, type], int]):
    """The slots of the rows of a site: by the path, the firing and the class of the module, which a parametrization changes."""

    def __init__(self, attached: AttachedHook, slot_of: Callable[[Context], int]) -> None:
        super().__init__()
        self._attached, self._slot_of = attached, slot_of

    def __missing__(self, key: tuple[str, FiringIndex, type]) -> int:
        path, firing, _ = key
        self[key] = slot = self._slot_of(self._attached.context(path, firing))
        return slot


def _recording(attached: AttachedHook, action: Record, is_scaled: bool) -> Direct | None:
    rows, measurement, clock = action.rows, action.measurement, attached.clock
    context = attached.context("", FIRST_CALL)
    slab = rows.slab_of(context)
    if slab is None or (is_scaled and (rows.merges(context) or "fingerprint" in measurement.statistics)):
        return None
    slots = _Slots(attached, lambda context: rows.slot("stats", context, measurement.names, is_scaled=is_scaled))
    record = Recording(
        slab,
        attached,
        clock,
        slots,
        attached.site.layer.module,
        measurement.further,
        attached.frequency == "step",
        attached.site.spec.definition.gradient,  # the original pass has recorded the other values
    )
    if not is_scaled:
        return record
    return lambda tensor, path, firing: record(tensor, path, firing) if rows.set_scale(clock.amp_scale()) else None


def are_recordings(attached_hooks: Sequence[AttachedHook]) -> bool:
    """Return whether all sites only record statistics by one call of the C extension. True for no sites."""
    return all(isinstance(attached.direct, Recording) for attached in attached_hooks)


def batched_launch(attached_hooks: Sequence[AttachedHook]) -> AbstractContextManager[None]:
    """Return a block in which sites measure tensors on a device with one launch per device and dtype, when it ends.

    It does nothing if any site does more than record statistics. The tensors must not be changed or freed in the block.
    """
    if attached_hooks and are_recordings(attached_hooks):
        rows: Rows = attached_hooks[0].action.rows
        return rows.batched_launch()
    return nullcontext()


def _changing(attached: AttachedHook, action: Intervention) -> Direct | None:
    if not is_connected:
        return None
    change, clock, rows = action.change, attached.clock, action.rows
    held = None if attached.site.spec.follows is None else True  # see `AttachedHook.context`
    slots, module = _Slots(attached, lambda context: rows.slot("effects", context, ())), attached.site.layer.module
    context = attached.context("", FIRST_CALL).without_tensors()

    def new_and_factor(tensor: Tensor, path: str, moment: StepContext) -> tuple[Tensor, Number] | None:
        if not is_plain_float(tensor):
            return None
        if tensor.is_cuda:
            check_not_captured(context)
        if attached.checked_paths is not None:
            attached.check_shape(path, tensor)
        context.moment = moment
        new, factor = call_action(change, tensor, context)
        return new, factor.item() if isinstance(factor, Tensor) and factor.is_cpu else factor

    def finish(tensor: Tensor, new: Tensor, factor: Number, slot: int, path: str, firing: FiringIndex) -> None:
        if not rows.record_plain_effect(tensor, new, slot, clock.moment, factor, held):
            effect = effect_of(tensor, new, factor, tensor.numel())
            effect.held = held
            rows.add_effect(attached.context(path, firing), effect)

    slab, is_repeated = rows.slab_of(context, "effects"), attached.site.spec.definition.repeats
    return Changing(slab, attached, clock, slots, module, 0, False, not is_repeated, new_and_factor, finish, held)


def is_plain_float(tensor: object) -> bool:
    """Return whether a value is a floating-point tensor of no subclass with strided memory on the CPU or a GPU."""
    return (
        type(tensor) is Tensor
        and tensor.is_floating_point()
        and tensor.layout is torch.strided
        and (tensor.is_cpu or tensor.is_cuda)
        and not tensor.is_nested
        and not tensor.is_inference()
    )


def check_not_captured(context: Context) -> None:
    """Raise a `HookError` if the current code becomes a CUDA graph."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise HookError(
            f"{describe(context)} failed: a CUDA graph is being captured, and replays of a graph call no hook. "
            "Capture the graph without this hook, or use torch.compile without CUDA graphs instead, which keeps hooks"
        )


def call_action(action: Callable[[Given, Context], Result], given: Given, context: Context) -> Result:
    """Call an action. An error of another class becomes a `HookError` that names the hook."""
    try:
        return action(given, context)
    # Checkpointing ends a recomputed pass with `_StopRecomputationError`.
    except (InstrumentError, _StopRecomputationError):
        raise
    except Exception as error:
        raise failed(error, given, context) from error


def failed(error: Exception, given: Any, context: Context) -> HookError:
    """Return the error of an action that failed on a tensor, or on several."""
    cause = f"{type(error).__name__}: {error}{user_code_location(error)}"
    return HookError(f"{describe(context)} failed: {cause}; the tensor is {structure(given)}")
