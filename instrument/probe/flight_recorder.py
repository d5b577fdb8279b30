"""The last tensors of record hooks with `keep`: in memory, until a rule fires or the run fails.

The memory is bounded: a new step reuses the memory of the oldest one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..actions.base import Context
from ..stats.device_copy import HostCopy
from ..values.int8_rows import dtype_of_copy

Period = tuple[int, str]
"""A step and a phase."""


def period_of(context: Context) -> Period:
    return context.moment.step, context.moment.phase


class RecordedTensor(NamedTuple):
    """A copy of a tensor that is not written yet, and the shape of the complete tensor."""

    context: Context
    source_shape: tuple[int, ...]
    copy: HostCopy
    dtype: torch.dtype | None  # see `instrument.Sink.keep`


class FlightRecorder:
    """Keeps the tensors of the last steps of each hook. `steps`: the number of steps at which a hook records, by hook."""

    def __init__(self, steps: Mapping[str, int]) -> None:
        self.steps = steps
        self.unwritten = [*steps]  # the hooks whose tensors were never taken
        self._tensors: dict[str, dict[Period, list[RecordedTensor]]] = {name: {} for name in steps}
        # Memory of the oldest step for the current one, by hook, and then by shape, dtype and whether it is pinned.
        self._unused: dict[str, dict[tuple[torch.Size, torch.dtype, bool], list[Tensor]]] = {name: {} for name in steps}

    def add(
        self,
        context: Context,
        source_shape: Sequence[int],
        tensor: Tensor,
        dtype: torch.dtype | None,
        *,
        has_pending_step: bool,
    ) -> None:
        """Copy a tensor; see `instrument.actions.base.Rows.add_tensor`.

        Args:
            has_pending_step: Whether the rules have not read the previous step yet, because its numbers are on a GPU. One more
                step is kept then.
        """
        hook, period = context.hook, period_of(context)
        periods = self._tensors[hook]
        if period not in periods:
            while len(periods) >= self.steps[hook] + has_pending_step:
                self._unused[hook] = defaultdict(list)
                for memory in (one.copy.memory for one in periods.pop(next(iter(periods)))):
                    self._unused[hook][memory.shape, memory.dtype, memory.is_pinned()].append(memory)
            periods[period] = []
        key = (tensor.shape, dtype_of_copy(tensor, dtype), tensor.is_cuda)
        unused = self._unused[hook].get(key)
        memory = unused.pop() if unused else torch.empty(key[0], dtype=key[1], device="cpu", pin_memory=key[2])
        periods[period].append(
            RecordedTensor(context, tuple(source_shape), HostCopy(tensor, memory, in_background=True), dtype)
        )

    @property
    def bytes(self) -> dict[str, int]:
        """The memory of the tensors of each hook."""
        return {
            hook: sum(one.copy.memory.nbytes for recorded in periods.values() for one in recorded)
            for hook, periods in self._tensors.items()
        }

    def take(self, hook: str) -> list[RecordedTensor]:
        """Return the tensors of a hook in the order of the firings, and forget them."""
        self.unwritten = [other for other in self.unwritten if other != hook]
        periods, self._tensors[hook] = self._tensors[hook], {}
        return [one for recorded in periods.values() for one in recorded]

    def periods(self) -> set[Period]:
        return {period for periods in self._tensors.values() for period in periods}
