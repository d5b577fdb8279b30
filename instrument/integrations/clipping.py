"""Runs functions before gradients are clipped, for trainers without a callback at that time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from ..probe.deferred_interrupts import signal_safe_contextmanager, uninterrupted

_listeners: list[Callable[[list[Tensor]], None]] = []


@wraps(clip_grad_norm_)
def _observed(parameters: Tensor | Iterable[Tensor], *args: Any, **kwargs: Any) -> Tensor:
    clipped = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    for listener in tuple(_listeners):
        listener(clipped)
    return clip_grad_norm_(clipped, *args, **kwargs)


@signal_safe_contextmanager
def before_clipping(listener: Callable[[list[Tensor]], None]) -> Iterator[None]:
    """Call a function with the parameters before `torch.nn.utils.clip_grad_norm_`, for the duration of a `with` block."""
    try:
        try:
            with uninterrupted():
                _listeners.append(listener)
                torch.nn.utils.clip_grad_norm_ = _observed
            yield
        finally:
            _remove(listener)
    finally:  # a signal can arrive before `_remove` defers it
        _remove(listener)


def _remove(listener: Callable[[list[Tensor]], None]) -> None:
    with uninterrupted():
        if listener in _listeners:
            _listeners.remove(listener)
        if not _listeners and torch.nn.utils.clip_grad_norm_ is _observed:
            torch.nn.utils.clip_grad_norm_ = clip_grad_norm_
