"""Code that a signal such as Ctrl-C does not end half-way."""

from __future__ import annotations

# The functions of `signal` convert each handler to an enumeration, which takes ten times as long as to set it.
import _signal  # type: ignore[import-not-found]
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from inspect import signature
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
Yielded = TypeVar("Yielded")
Handlers = Mapping[int, Callable[[int, FrameType | None], Any]]

SIGNALS = (_signal.SIGINT, _signal.SIGTERM)
ALL_SIGNALS = tuple(_signal.valid_signals())
DUPLICATE_SECONDS = 0.25  # Programs such as `timeout` send a signal to a process and then to its group.


def deferred_signals() -> AbstractContextManager[None]:
    """Defer Ctrl-C and SIGTERM to the end of a `with` block. A second signal, other than a duplicate, is handled at once.

    Only signals with a Python handler are deferred, and only in the main thread, which is the only one that handles
    them. Their handlers are called once at the end, also after an exception.
    """
    return _Deferred(SIGNALS, handles_second=True)


def uninterrupted() -> AbstractContextManager[None]:
    """Defer all signals to the end of a short `with` block, also repeated ones; see `deferred_signals`."""
    return _Deferred(ALL_SIGNALS, handles_second=False)


class _Deferred(AbstractContextManager[None]):
    """Defers signals; a class, because the end of each step uses it, and a generator takes twice as long."""

    def __init__(self, numbers: Iterable[int], *, handles_second: bool) -> None:
        self._numbers = numbers
        self._handles_second = handles_second
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._received: dict[int, FrameType | None] = {}
        self._first_at = 0.0

    def __enter__(self) -> None:
        try:
            for number in self._numbers:
                if callable(handler := _signal.getsignal(number)):
                    self._handlers[number] = handler
                    _signal.signal(number, self._note)
        except BaseException as error:
            if isinstance(error, ValueError) and threading.current_thread() is not threading.main_thread():
                self._handlers.clear()  # only the main thread sets handlers: none was replaced
                return
            self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        try:
            _restore(self._handlers)
        except BaseException:  # a restored handler may have raised an exception before the others were restored
            _restore(self._handlers)
            raise
        finally:
            if self._received:
                _handle(self._received, self._handlers)

    def _note(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        self._first_at = self._first_at if self._received else now
        self._received[number] = frame
        if self._handles_second and now - self._first_at > DUPLICATE_SECONDS:
            _handle(self._received, self._handlers)


def _restore(handlers: Handlers) -> None:
    for number, handler in handlers.items():
        _signal.signal(number, handler)


def _handle(received: dict[int, FrameType | None], handlers: Handlers) -> None:
    """Call the handlers of the received signals in their order, also after one of them has raised an exception."""
    number = next(iter(received))
    frame = received.pop(number)
    try:
        handlers[number](number, frame)
    finally:
        if received:
            _handle(received, handlers)


class _SignalSafeBlock(AbstractContextManager[Yielded]):
    """Ends a block of a generator also if a signal arrives in the code of `contextlib`, before the block begins or ends."""

    def __init__(self, block: AbstractContextManager[Yielded]) -> None:
        self._block = block

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name} is not available here: use the object after `with ... as`, or keep this block and use what its __enter__ returns"
        )

    def __enter__(self) -> Yielded:
        if not hasattr(self._block, "args"):  # contextlib deletes them when the block begins
            raise RuntimeError("this block has begun already; call the function again for another block")
        try:
            return self._block.__enter__()
        except BaseException as error:
            self._block.__exit__(type(error), error, error.__traceback__)  # no effect if the generator has ended
            raise

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None
    ) -> bool | None:
        try:
            return self._block.__exit__(exc_type, exc, tb)
        except BaseException as error:
            self._block.__exit__(type(error), error, error.__traceback__)
            raise


def signal_safe_contextmanager(
    generator_function: Callable[P, Iterator[Yielded]],
) -> Callable[P, AbstractContextManager[Yielded]]:
    """Like `contextlib.contextmanager`. The generator also ends if a signal arrives between it and the `with` block."""
    make_block = contextmanager(generator_function)

    @wraps(generator_function)
    def begin(*args: P.args, **kwargs: P.kwargs) -> AbstractContextManager[Yielded]:
        try:
            block = make_block(*args, **kwargs)
        except TypeError as error:  # of the arguments: the body of the generator has not begun
            parameters = ", ".join(signature(generator_function).parameters)
            raise TypeError(f"{error}; the parameters are {parameters}") from None
        return _SignalSafeBlock(block)

    return begin
