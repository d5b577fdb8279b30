"""The calls of one module: their indices, the active ones, and those that activation checkpointing recomputes.

A recomputed call has the index of the original call, so that an intervention draws the same random numbers. The order
within the micro-step does not identify a call: segments are recomputed in reverse order, and a module may occur in
several segments, several times.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils import checkpoint

from ..actions.base import UNKNOWN_CALL
from ..containers import CopiedContainer
from .clock import Clock

_graph_task = torch._C._current_graph_task_id
_packing_hooks = torch._C._autograd._top_saved_tensors_default_hooks


@dataclass(slots=True)
class Call:
    """One call of a module.

    Attributes:
        index: The index within the micro-step, from 0, in the order in which calls started.
        is_recomputed: Whether activation checkpointing recomputes it during the backward pass.
        segment: The innermost checkpoint segment of the call; None outside of segments.
        on_output: Called with the output of the module after it has run.
        versions: The versions of the input tensors, by identity; None if they are not needed.
        inputs_are_data: Whether no input requires a gradient.
        copies: The containers that the module gets instead of those of the caller.
    """

    index: int
    is_recomputed: bool
    segment: object | None
    on_output: Callable[[Any], None] | None = None
    versions: dict[int, int] | None = None
    inputs_are_data: bool = False
    copies: Sequence[CopiedContainer] = ()

    @property
    def graph_is_discarded(self) -> bool:
        """Whether its gradients belong to the original pass. The graph of this pass is discarded."""
        return self.is_recomputed and isinstance(self.segment, checkpoint._CheckpointFrame)


class Calls:
    """The calls of one module. Several are active at once if the module calls itself."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.micro_step_index = -1
        self.count = 0
        self.active: list[Call] = []
        self.call_indices: WeakKeyDictionary[object, list[int]] = WeakKeyDictionary()  # call indices in each segment
        # The backward pass, and the number of its calls so far.
        self.recompute_progress: WeakKeyDictionary[object, tuple[int, int]] = WeakKeyDictionary()

    def enter(self) -> Call:
        """Start a call."""
        if self.micro_step_index != self.clock.micro_step_index:
            self.micro_step_index, self.count = self.clock.micro_step_index, 0
            self.active.clear()
        is_recomputed = _graph_task() != -1  # a module that runs in a backward pass is recomputed by checkpointing
        segments = list(_segments()) if is_recomputed or _may_be_checkpointed() else []
        index = self._original_index(segments) if is_recomputed else self.count
        self.count += not is_recomputed
        for segment, is_being_recomputed in segments:
            if is_being_recomputed:
                break
            self.call_indices.setdefault(segment, []).append(index)
        while self.active and _was_abandoned(self.active[-1], segments):
            self.active.pop()
        call = Call(index, is_recomputed, segments[0][0] if segments else None)
        self.active.append(call)
        return call

    def leave(self) -> Call | None:
        """End the last active call; None if its start was not seen."""
        return self.active.pop() if self.active else None

    @property
    def has_unfinished(self) -> bool:
        """Whether a call in the current micro-step started but did not end: its forward pass raised an exception."""
        return self.micro_step_index == self.clock.micro_step_index and any(
            not call.is_recomputed for call in self.active
        )

    def _original_index(self, segments: list[tuple[object, bool]]) -> int:
        """Return the index of the original call, given its position among the calls of its segment."""
        task = _graph_task()
        segment = next((segment for segment, is_being_recomputed in segments if is_being_recomputed), None)
        if segment is None:
            return 0 if self.count == 1 else UNKNOWN_CALL
        previous_task, position = self.recompute_progress.get(segment, (task, 0))
        position = position if previous_task == task else 0
        self.recompute_progress[segment] = task, position + 1
        indices = self.call_indices.get(segment, [])
        return indices[position] if position < len(indices) else UNKNOWN_CALL


def current_segment() -> object | None:
    """Return the innermost checkpoint segment of the current code; None outside of segments."""
    may_be_in_segment = _graph_task() != -1 or _may_be_checkpointed()
    return next((segment for segment, _ in _segments()), None) if may_be_in_segment else None


def recomputed_segment() -> object | None:
    """Return the innermost checkpoint segment that is being recomputed; None outside of a recomputation."""
    return next((segment for segment, is_being_recomputed in _segments() if is_being_recomputed), None)


def is_first_reentrant_pass() -> bool:
    """Return whether the current code is the first pass of a reentrant segment, which has no graph."""
    if torch.is_grad_enabled():
        return False
    innermost = next(_segments(), None)
    return innermost is not None and not innermost[1] and not isinstance(innermost[0], checkpoint._CheckpointFrame)


def _was_abandoned(call: Call, segments: list[tuple[object, bool]]) -> bool:
    """Return whether a call will not return. Checkpointing recomputes no more of a segment than required."""
    return (
        call.is_recomputed and call.segment is not None and all(segment is not call.segment for segment, _ in segments)
    )


def _may_be_checkpointed() -> bool:
    """Return whether a forward pass may be part of a segment: it has no graph, or a hook packs its saved tensors."""
    return not torch.is_grad_enabled() or _packing_hooks(True) is not None


def _segments() -> Iterator[tuple[object, bool]]:
    """Yield the segments of the current code, innermost first, and whether each is being recomputed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            segment, is_being_recomputed = _segment_at(frame)
            if segment is not None:
                yield segment, is_being_recomputed
        frame = frame.f_back


def _segment_at(frame: FrameType) -> tuple[object | None, bool]:
    """Return the segment of a function of PyTorch's checkpointing, and whether it is being recomputed.

    A reentrant segment is identified by its graph node, another one by PyTorch's frame object. None for other
    functions.
    """
    match frame.f_code.co_name:
        case "forward" | "backward":
            return frame.f_locals.get("ctx"), frame.f_code.co_name == "backward"
        case "unpack_hook":
            return frame.f_locals.get("frame"), True
        case _ if "gen" in frame.f_locals:
            running = frame.f_locals["gen"].gi_frame
            return (None if running is None else running.f_locals.get("new_frame")), False
        case _:
            return None, False
