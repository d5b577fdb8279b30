"""Operations of this package that others do not observe: collective operations by hooks, operators by selective checkpointing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachingTorchDispatchMode

_depth = threading.local()


@contextmanager
def own_collectives() -> Iterator[None]:
    """Mark the collective operations that this thread calls in the block, or in the decorated function, as those of this package."""
    _depth.count = getattr(_depth, "count", 0) + 1
    try:
        yield
    finally:
        _depth.count -= 1


def are_own_collectives() -> bool:
    return getattr(_depth, "count", 0) > 0


_SEEN = nullcontext()


def unseen_by_checkpoint() -> AbstractContextManager[Any]:
    """Return a block for operators that a recomputed pass does not repeat.

    Selective checkpointing would save their results, and use them in the backward pass for operators of the model.
    """
    modes = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else ()
    return _disable_current_modes() if any(isinstance(mode, _CachingTorchDispatchMode) for mode in modes) else _SEEN
