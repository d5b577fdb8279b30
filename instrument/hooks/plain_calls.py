"""The C extension for calls of modules whose hooks have no stages (`plain_calls.c`), and Python fallbacks if it is not built.

With the fallbacks, all calls run Python code.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import lru_cache
from itertools import count
from typing import Any

import torch

from .clock import FiringIndex, graph_task
from .gradient_hooks import register_at_base

__all__ = ["CallIndices", "FiringCounts", "PlainCalls", "Recording", "update_counts"]  # of the C extension

current_transform = torch._C._functorch.peek_interpreter_stack
"""Returns the transform of torch.func that runs this code; None without one."""
is_tracing = torch._C._is_tracing
"""Returns whether `torch.jit.trace` runs this code."""
saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""Returns the innermost hooks on saved tensors, None without any. Its argument is `ignore_is_tracing`."""
firing_of = lru_cache(4096)(FiringIndex)
"""Returns a cached `FiringIndex`. It runs no Python code for one that is in the cache."""

try:
    from ..stats.native import CallIndices, FiringCounts, PlainCalls, Recording, connect_torch, update_counts

    connect_torch(
        current_transform,
        is_tracing,
        graph_task,
        torch.is_grad_enabled,
        saved_tensors_hooks,
        OrderedDict,
        firing_of,
        register_at_base,
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

    class Recording:  # type: ignore[no-redef]
        """For type checks. It has no objects, and neither has `PlainCalls`."""

    PlainCalls = Recording  # type: ignore[misc, assignment]
