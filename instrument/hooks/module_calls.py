"""The calls of one module: their indices, the active ones, and those that repeat an earlier one in the backward pass.

A call that `torch.utils.checkpoint` recomputes has the index of the original call, so that an intervention draws the same
random numbers. The order within the micro-step does not identify a call: segments are recomputed in reverse order, and a
module may occur in several segments, several times.

Other code calls modules in a backward pass too: the adjoint of a differential equation, reversible blocks, and custom
implementations of checkpointing. Each of these calls has its own index. If it gets the same tensors as an earlier call,
interventions repeat the random numbers of that call.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import checkpoint

from ..actions.base import UNKNOWN_CALL
from ..values.containers import CopiedContainer
from ..values.nested import iter_tensors
from .clock import Clock, FiringIndex, graph_task
from .plain_calls import CallIndices, firing_of, saved_tensors_hooks

_is_grad_enabled = torch.is_grad_enabled
_thread = threading.get_ident
_ENGINE_START = torch.autograd.backward.__code__

Memory = tuple[tuple[StorageWeakRef, int, tuple[int, ...], tuple[int, ...], int], ...]
"""For each tensor: its storage, offset, shape, strides and version."""
_FEW_CALLS = 100  # whose inputs are known, before those are removed that are no longer in memory


class Call:
    """One call of a module."""

    on_output: Callable[[Any], None] | None = None  # called with the output of the module after it has run
    versions: dict[int, int] | None = None  # of the input tensors, by identity; None if they are not needed
    copies: Sequence[CopiedContainer] = ()  # the containers that the module gets instead of those of the caller
    # The first tensor of the arguments, and a copy of it, which the module does not change; None if not needed.
    first_input: tuple[Tensor, Tensor] | None = None

    def __init__(
        self, index: int, origin: int, micro_step_index: int, recomputed: object = None, segment: object = None
    ) -> None:
        self.index = index  # within the micro-step, from 0, in the order in which calls started
        self.origin = origin  # the index of the call whose random numbers it repeats, or its own index
        self.micro_step_index = micro_step_index
        self.recomputed = (
            recomputed  # the innermost segment that checkpointing runs again, in a backward pass; None in other calls
        )
        self.is_recomputed = recomputed is not None
        self.segment = segment  # the innermost checkpoint segment of the call; None outside of segments
        self.repeats = self.is_recomputed or origin != index  # an earlier call, in a backward pass

    @property
    def graph_is_discarded(self) -> bool:
        """Whether its gradients belong to the original pass. The graph of this pass is discarded."""
        return isinstance(self.recomputed, checkpoint._CheckpointFrame)

    def firing(self, backward: int = 0) -> FiringIndex:
        """Return the index of a firing in this call. `backward` is the index of the backward pass."""
        return firing_of(self.index, backward, self.is_recomputed, self.origin)


class Calls:
    """The calls of one module. Several are active at once if the module calls itself, or runs in several threads.

    The hook groups of a module share this object, so that a call has the same index in all of them.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        # Whether a call that repeats an earlier one is recognized by its inputs, and whether the module has several hook groups.
        self.note_inputs = self.is_shared = self._has_group = False
        self.indices = CallIndices()  # of the next call, and the open call that `PlainCalls.enter` began
        self._lock = threading.Lock()
        self._active: dict[tuple[int, object], list[Call]] = {}  # by thread and hook group
        # By thread, if the object is shared: the call that started last, and the groups that have seen its start.
        self._started: dict[int, tuple[Call, set[object]]] = {}
        self.call_indices: WeakKeyDictionary[object, list[int]] = WeakKeyDictionary()  # call indices in each segment
        # The backward pass, and the number of its calls so far.
        self.recompute_progress: WeakKeyDictionary[object, tuple[int, int]] = WeakKeyDictionary()
        # Calls of a micro-step that a backward pass may repeat, and their inputs.
        self._repeatable: list[tuple[int, Memory]] = []
        self._repeatable_micro_step = -1
        self._most_repeatable = _FEW_CALLS

    def add_group(self, *, note_inputs: bool = True) -> None:
        """Add a hook group; `note_inputs`: whether it needs to know which calls repeat an earlier one."""
        self.is_shared, self._has_group = self._has_group, True
        self.note_inputs |= note_inputs

    def enter(self, group: object, inputs: Iterable[Any] = (), *, in_graph: bool = False) -> Call:
        """Start a call in a hook group. In a compiled graph (`in_graph`), no gradients are computed, also if there is a backward pass."""
        micro_step_index, indices = self.clock.micro_step_index, self.indices
        plain_call = None if in_graph or not indices.is_open else self._end_plain_call()
        indices.start_micro_step(micro_step_index)
        key = _thread(), group
        active = self._active.get(key)
        if active is None:
            active = self._active.setdefault(key, [])
        elif active and active[0].micro_step_index != micro_step_index:  # an exception ended it
            active.clear()
        if plain_call is not None and plain_call.micro_step_index == micro_step_index:
            active.append(plain_call)
        if self.is_shared and (other := self._started_by_others(group)) is not None:
            call = Call(other.index, other.origin, micro_step_index, other.recomputed, other.segment)
        elif graph_task() == -1 and (in_graph or _is_grad_enabled()) and saved_tensors_hooks(True) is None:
            index = indices.latest = indices.next_index()
            call = Call(index, index, micro_step_index)
        elif in_graph and indices.latest >= 0 and graph_task() != -1 and not _segments():
            call = Call(
                self._only_call, self._only_call, micro_step_index, recomputed=True
            )  # the graph hides its segment
        else:
            call = self._enter_segment(inputs, active)
        active.append(call)
        if self.is_shared:
            self._started.setdefault(key[0], (call, set()))[1].add(group)
        return call

    def _started_by_others(self, group: object) -> Call | None:
        """Return the call whose start other groups have seen, and this one sees now; None if it sees a start first."""
        call, groups = self._started.get(_thread(), (None, ()))
        if call is not None and group not in groups and call.micro_step_index == self.indices.micro_step_index:
            return call
        self._started.pop(_thread(), None)
        return None

    def _enter_segment(self, inputs: Iterable[Any], active: list[Call]) -> Call:
        """Start a call that may be part of a checkpoint segment, or that runs in a backward pass."""
        is_in_backward = graph_task() != -1
        segments = _segments()
        with self._lock:  # several threads may start the first such call of a micro-step
            if self._repeatable_micro_step != self.clock.micro_step_index:
                self._repeatable, self._repeatable_micro_step = [], self.clock.micro_step_index
        again = (segment for segment, is_being_recomputed in segments if is_being_recomputed and is_in_backward)
        recomputed = next(again, None)
        index = origin = self.indices.next_index() if recomputed is None else self._original_index(recomputed)
        if is_in_backward and recomputed is None and self._repeatable:
            origin = self._repeated_index(inputs, index)
        elif self.note_inputs and not (is_in_backward or segments):
            self._note_inputs(index, inputs)
        for segment, is_being_recomputed in segments:
            if is_being_recomputed:
                break
            self.call_indices.setdefault(segment, []).append(index)
        while active and _was_abandoned(active[-1], segments):
            active.pop()
        segment = segments[0][0] if segments else None
        return Call(index, origin, self.clock.micro_step_index, recomputed, segment)

    def _end_plain_call(self) -> Call | None:
        """End the open call of this thread, which `PlainCalls.enter` began. Return None if no call is open."""
        micro_step_index, index = self.indices.open_micro_step, self.indices.end_open_call()
        return None if index is None else Call(index, index, micro_step_index)

    def leave(self, group: object, *, in_graph: bool = False) -> Call | None:
        """End the last active call of this thread in a hook group; None if its start was not seen; `in_graph`: see `enter`."""
        if self.indices.is_open and not in_graph and (plain_call := self._end_plain_call()) is not None:
            return plain_call
        key = _thread(), group
        active = self._active.get(key)
        if self.is_shared:
            self._started.pop(key[0], None)
        return active.pop() if active else None

    @property
    def has_unfinished(self) -> bool:
        """Whether a call in the current micro-step started but did not end: its forward pass or a hook raised an exception."""
        now, indices = self.clock.micro_step_index, self.indices
        return now in (indices.open_micro_step if indices.is_open else -1, indices.failed_micro_step) or any(
            call.micro_step_index == now and not call.is_recomputed
            for active in self._active.copy().values()
            for call in active
        )

    def _original_index(self, segment: object) -> int:
        """Return the index of the original call, given its position among the calls of its segment."""
        task = graph_task()
        previous_task, position = self.recompute_progress.get(segment, (task, 0))
        position = position if previous_task == task else 0
        self.recompute_progress[segment] = task, position + 1
        indices = self.call_indices.get(segment, [])
        return indices[position] if position < len(indices) else self._only_call

    @property
    def _only_call(self) -> int:
        """The index of the call of a micro-step with one call. Compiled code does not tell which one of several is recomputed."""
        return 0 if self.indices.latest == 0 else UNKNOWN_CALL

    def _note_inputs(self, index: int, inputs: Iterable[Any]) -> None:
        """Note the inputs of a call without a graph, or with hooks on saved tensors: a backward pass may repeat it."""
        self._repeatable.append((index, _memory_of(inputs)))
        if len(self._repeatable) > self._most_repeatable:
            self._repeatable = [
                each for each in self._repeatable if not any(storage.expired() for storage, *_ in each[1])
            ]
            self._most_repeatable = _FEW_CALLS + 2 * len(self._repeatable)

    def _repeated_index(self, inputs: Iterable[Any], index: int) -> int:
        """Return the index of the call that had the same inputs; `index` if none had, and `UNKNOWN_CALL` if several had."""
        memory = _memory_of(inputs)
        indices = [earlier for earlier, other in self._repeatable if other == memory]
        return index if not indices else indices[0] if len(indices) == 1 else UNKNOWN_CALL


def current_segment() -> object | None:
    """Return the innermost checkpoint segment of the current code; None outside of segments."""
    if graph_task() == -1 and _is_grad_enabled() and saved_tensors_hooks(True) is None:
        return None
    return next((segment for segment, _ in _segments()), None)


def is_first_reentrant_pass() -> bool:
    """Return whether the current code is the first pass of a reentrant segment, which has no graph."""
    if torch.is_grad_enabled():
        return False
    segment, is_being_recomputed = next(iter(_segments()), (None, False))
    return segment is not None and not is_being_recomputed and not isinstance(segment, checkpoint._CheckpointFrame)


def _was_abandoned(call: Call, segments: list[tuple[object, bool]]) -> bool:
    """Return whether a call will not return. Checkpointing recomputes no more of a segment than required."""
    return (
        call.is_recomputed and call.segment is not None and all(segment is not call.segment for segment, _ in segments)
    )


def _memory_of(inputs: Iterable[Any]) -> Memory:
    """Return where the tensors of a call are in memory. While this is kept, no other tensor can have the same storage."""
    return tuple(
        (
            StorageWeakRef(tensor.untyped_storage()),
            int(tensor.storage_offset()),
            tuple(tensor.shape),
            tensor.stride(),
            0 if tensor.is_inference() else tensor._version,
        )
        for value in inputs
        for _, tensor in iter_tensors(value)
        if tensor.layout is torch.strided and not tensor.is_nested
    )


def _segments() -> list[tuple[object, bool]]:
    """Return the segments of the current code, innermost first, each with whether it is being recomputed."""
    segments = []
    inner: FrameType | None = None
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            segment, is_being_recomputed = _segment_at(frame, inner)
            if segment is not None:
                segments.append((segment, is_being_recomputed))
        inner, frame = frame, frame.f_back
    return segments


def _segment_at(frame: FrameType, inner: FrameType | None) -> tuple[object | None, bool]:
    """Return the segment of a function of PyTorch's checkpointing, and whether it is being recomputed.

    A reentrant segment is identified by its graph node, another one by PyTorch's frame object. None for other
    functions. A reentrant segment that was recomputed runs its backward pass in the same function.
    """
    match frame.f_code.co_name:
        case "backward" if inner is not None and inner.f_code is _ENGINE_START:
            return None, False
        case "forward" | "backward":
            return frame.f_locals.get("ctx"), frame.f_code.co_name == "backward"
        case "unpack_hook":
            return frame.f_locals.get("frame"), True
        case _ if "gen" in frame.f_locals:
            running = frame.f_locals["gen"].gi_frame
            return (None if running is None else running.f_locals.get("new_frame")), False
        case _:
            return None, False
