"""Operators that selective activation checkpointing does not see."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import _CachingTorchDispatchMode

_SEEN = nullcontext()


def unseen_by_checkpoint() -> AbstractContextManager[Any]:
    """Return a block for operators that a recomputed pass does not repeat.

    Selective checkpointing would save their results, and use them in the backward pass for operators of the model.
    """
    modes = _get_current_dispatch_mode_stack() if torch._C._len_torch_dispatch_stack() else ()
    return _disable_current_modes() if any(isinstance(mode, _CachingTorchDispatchMode) for mode in modes) else _SEEN
