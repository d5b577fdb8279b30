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

    The argument with this name has the tensors: one, or an iterable.
    """

    def __init__(self, owner: Any, name: str, argument: str) -> None:
        self._owner, self._name, self._argument = owner, name, argument
        self._listeners: list[Listener] = []
        self._original = self._observed = getattr(owner, name)
        self._parameters = signature(self._original)

    def _observe(self) -> None:
        """Replace the function, which other code may have replaced as well."""
        self._original = original = getattr(self._owner, self._name)
        self._listeners = listeners = list[Listener]()

        @wraps(original)
        def observed(*args: Any, **kwargs: Any) -> Any:
            call = self._parameters.bind(*args, **kwargs)
            given = call.arguments[self._argument]
            tensors = [given] if isinstance(given, Tensor) else list(given)
            call.arguments[self._argument] = given if isinstance(given, Tensor) else tensors  # an iterator ends
            for listener in tuple(listeners):
                listener(tensors)
            return original(*call.args, **call.kwargs)

        self._observed = observed
        setattr(self._owner, self._name, observed)

    @signal_safe_contextmanager
    def before(self, listener: Listener) -> Iterator[None]:
        """Call a listener with the tensors before each call, for the duration of a `with` block."""
        try:
            try:
                with uninterrupted():
                    if not self._listeners:
                        self._observe()
                    self._listeners.append(listener)
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
