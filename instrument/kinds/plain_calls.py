"""The compiled code for calls that need no Python code (`plain_calls.c`), and what replaces it without a C compiler.

Without it, no recording is composed, and all calls run Python code.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import lru_cache
from itertools import count

import torch

from .clock import Firing, graph_task

__all__ = ["CallCounter", "Counts", "PlainCalls", "Recording", "firing_of", "packing_hooks", "transform"]

transform = torch._C._functorch.peek_interpreter_stack
"""Returns the transform of torch.func that runs this code, if any."""
packing_hooks = torch._C._autograd._top_saved_tensors_default_hooks
"""Called with true, returns the innermost hooks on saved tensors; None without any."""
firing_of = lru_cache(4096)(Firing)
"""Returns a cached `Firing`. It runs no Python code for one that is in the cache."""

try:
    from ..stats.native import CallCounter, Counts, PlainCalls, Recording, connect_torch

    connect_torch(transform, graph_task, torch.is_grad_enabled, packing_hooks, OrderedDict, firing_of)
# Installed without a C compiler.
except ImportError:

    class Counts:  # type: ignore[no-redef]
        """The opportunities and firings of a site in the current micro-step."""

        __slots__ = ("firings", "opportunities")

    class CallCounter:  # type: ignore[no-redef]
        """The indices of a module's calls; see `plain_calls.c`."""

        is_open = False
        open_micro_step = -1

        def __init__(self) -> None:
            self.micro_step_index = self.latest = -1
            self._indices = count()
            self._lock = threading.Lock()

        def begin(self, micro_step_index: int) -> None:
            """Start at 0 again in another micro-step than before."""
            with self._lock:  # several threads may start the first call of a micro-step
                if self.micro_step_index != micro_step_index:
                    self._indices, self.latest = count(), -1
                    self.micro_step_index = micro_step_index

        def take(self) -> int:
            """Return the next index."""
            return next(self._indices)

        def pop(self) -> None:
            """Do nothing: no call is open."""

    class Recording:  # type: ignore[no-redef]
        """No object has this class."""

    class PlainCalls:  # type: ignore[no-redef]
        """No object has this class."""
