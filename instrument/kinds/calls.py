"""The calls of one module: their numbers, those that are under way, and those that activation checkpointing repeats.

A call that is repeated in the backward pass has the number that it had in the forward pass, so that an intervention
that draws at random draws the same again. A number within the turn does not tell them apart: segments are repeated
last one first, and a module may be in several of them, several times.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import torch
from torch.utils import checkpoint

from ..actions.base import UNKNOWN_CALL
from .live import Clock

if TYPE_CHECKING:
    from .tensor import Given


@dataclass(slots=True)
class Call:
    """One call of a module.

    Attributes:
        number: From 0 in each turn, in the order in which the calls began.
        again: Whether it is repeated by activation checkpointing, inside the backward pass.
        segment: The innermost segment of checkpointing that it is in; None outside of all.
        given: What the module was given, where gradients of it are awaited.
        versions: The tensors that went in, by identity, and their versions.
        on_data: Whether what went in needs no gradient.
    """

    number: int
    again: bool
    segment: object | None
    given: Given | None = None
    versions: dict[int, int] = field(default_factory=dict)
    on_data: bool = False

    @property
    def seen_before(self) -> bool:
        """Whether its gradients belong to the pass that was made first: the graph of this one is thrown away."""
        return self.again and isinstance(self.segment, checkpoint._CheckpointFrame)


class Calls:
    """The calls of one module. A module may call itself, so that several are under way."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.turn = -1
        self.made = 0
        self.under_way: list[Call] = []
        self.numbers: WeakKeyDictionary[object, list[int]] = WeakKeyDictionary()  # of the calls in each segment
        self.repeated: WeakKeyDictionary[object, tuple[int, int]] = WeakKeyDictionary()  # backward pass, calls so far

    def enter(self) -> Call:
        """A call begins."""
        if self.turn != self.clock.turn:
            self.turn, self.made = self.clock.turn, 0
            self.under_way.clear()
        again = in_backward()
        around = list(_segments()) if again or _may_be_checkpointed() else []
        number = self._number_of_repeated(around) if again else self.made
        self.made += not again
        for segment, repeated in around:
            if repeated:
                break
            self.numbers.setdefault(segment, []).append(number)
        while self.under_way and _was_broken_off(self.under_way[-1], around):
            self.under_way.pop()
        call = Call(number, again, around[0][0] if around else None)
        self.under_way.append(call)
        return call

    def leave(self) -> Call | None:
        """The call that began last is over; None where it began unseen."""
        return self.under_way.pop() if self.under_way else None

    @property
    def broke_off(self) -> bool:
        """Whether a call of the turn that is running began and did not end: its forward pass raised an exception."""
        return self.turn == self.clock.turn and any(not call.again for call in self.under_way)

    def _number_of_repeated(self, around: list[tuple[object, bool]]) -> int:
        """The number that a call had in the first pass: by its place among the calls of its segment."""
        task = torch._C._current_graph_task_id()
        segment = next((segment for segment, repeated in around if repeated), None)
        if segment is None:
            return 0 if self.made == 1 else UNKNOWN_CALL
        before, place = self.repeated.get(segment, (task, 0))
        place = place if before == task else 0
        self.repeated[segment] = task, place + 1
        known = self.numbers.get(segment, [])
        return known[place] if place < len(known) else UNKNOWN_CALL


def in_backward() -> bool:
    """Whether this thread is inside a backward pass: a module that runs there is run again by checkpointing."""
    return bool(torch._C._current_graph_task_id() != -1)


def _was_broken_off(call: Call, around: list[tuple[object, bool]]) -> bool:
    """Whether a call will not return: checkpointing repeats no more of a segment than it needs."""
    return call.again and call.segment is not None and all(segment is not call.segment for segment, _ in around)


def _may_be_checkpointed() -> bool:
    """Whether a forward pass may be part of a segment: such a pass has no graph, or packs what the graph saves."""
    return not torch.is_grad_enabled() or torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _segments() -> Iterator[tuple[object, bool]]:
    """The segments that this code runs in, the innermost first, and whether it is repeating them."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == checkpoint.__file__:
            segment, repeated = _segment_at(frame)
            if segment is not None:
                yield segment, repeated
        frame = frame.f_back


def _segment_at(frame: FrameType) -> tuple[object | None, bool]:
    """The segment that a function of PyTorch's checkpointing is at, and whether it is repeating it; None for others.

    A reentrant segment is its node in the graph; another one is what PyTorch calls its frame.
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
