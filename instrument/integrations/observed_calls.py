"""Runs functions before calls of other libraries, for trainers without a callback at that time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ..runtime.deferred_interrupts import signal_safe_contextmanager, uninterrupted

Listener = Callable[[list[Tensor]], None]


class ObservedFunction:
    """A function of a module, or a method of a class. While there are listeners, each call passes its tensors to them first.

    Args:
        argument: The name of the argument with the tensors: one, or an iterable.
    """

    def __init__(self, owner: Any, name: str, argument: str) -> None:
        self._owner, self._name = owner, name
        self._original = original = getattr(owner, name)
        self._listeners: list[Listener] = []
        parameters = signature(original)

        @wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            call = parameters.bind(*args, **kwargs)
            given = call.arguments[argument]
            tensors = [given] if isinstance(given, Tensor) else list(given)
            call.arguments[argument] = given if isinstance(given, Tensor) else tensors  # an iterator ends
            for listener in tuple(self._listeners):
                listener(tensors)
            return original(*call.args, **call.kwargs)

        self._observed = observed

    @signal_safe_contextmanager
    def before(self, listener: Listener) -> Iterator[None]:
        """Call a listener with the tensors before each call, for the duration of a `with` block."""
        try:
            try:
                with uninterrupted():
                    self._listeners.append(listener)
                    setattr(self._owner, self._name, self._observed)
                yield
            finally:
                self._remove(listener)
        finally:  # a signal can arrive before `_remove` defers it
            self._remove(listener)

    def _remove(self, listener: Listener) -> None:
        with uninterrupted():
            if listener in self._listeners:
                self._listeners.remove(listener)
            if not self._listeners and getattr(self._owner, self._name) is self._observed:
                setattr(self._owner, self._name, self._original)


CLIPPING = ObservedFunction(torch.nn.utils, "clip_grad_norm_", "parameters")
