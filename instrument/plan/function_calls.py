"""The calls of torch functions inside modules: their names, their numbers, and the module call that each belongs to.

A `TorchFunctionMode` sees every torch function that Python code calls. It is active only inside the modules that hooks of
kind `function` or `function_grad` match, and PyTorch disables it while it handles a call. A function that is written in
Python is therefore seen as one call, without the functions that it calls.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from ..spec.base import HookBase
from ..spec.globs import matches

_MOST_FUNCTIONS = 10_000
_CALL = nn.Module._call_impl.__code__
# Reads and writes of properties, methods that change no value, and functions whose result has no values yet.
_IGNORED = frozenset(
    {
        "__get__",
        "__set__",
        "__delete__",
        "detach_",
        "register_hook",
        "requires_grad_",
        "retain_grad",
        "set_",
        "share_memory_",
    }
    | {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
RESHAPING = frozenset(  # functions that change the shape or the strides of a tensor in place, and none of its values
    {"as_strided_", "resize_", "resize_as_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"}
)


def function_name(function: Any) -> str | None:
    """Return the name of a torch function, such as `softmax`; None for functions that are not observed."""
    name = getattr(function, "__name__", None)
    return None if not isinstance(name, str) or name in _IGNORED else name.partition(".")[0]


def selects(spec: HookBase, name: str) -> bool:
    """Return whether a spec selects the functions with this name."""
    return any(matches(pattern, name) for pattern in spec.functions)


@dataclass(slots=True, eq=False)
class RunningModule:
    """A call of a module that is running.

    Attributes:
        frame: The Python frame of the call.
        observers: What observes its functions, by the name of the spec.
        counts: The number of calls of each function so far, by the name of the spec and of the function.
        has_pushed_mode: Whether the mode became active when this call started.
    """

    frame: FrameType
    observers: Mapping[str, Any]
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    has_pushed_mode: bool = False


class Owner(NamedTuple):
    """The call of a module that a function call belongs to, for one spec.

    Attributes:
        running: The call of the module.
        observer: What observes it for the spec.
        path: The path of the function call: its name, and its number among the calls of this function.
    """

    running: Any
    observer: Any
    path: str


class FunctionMode(TorchFunctionMode):
    """Observes the torch functions that one thread calls in running modules.

    A call belongs to the innermost running module that the same spec matched.

    Args:
        specs: The specs of the function kinds.
        own_hooks: The hooks of this package, and those that shard parameters. The functions that they call are not observed.
    """

    def __init__(self, specs: Sequence[HookBase], own_hooks: Iterable[Callable[..., Any]]) -> None:
        super().__init__()
        self.specs = specs
        self.running: list[RunningModule] = []
        self._own_hooks = frozenset(id(hook.__code__) for hook in own_hooks)
        self._known: dict[Any, tuple[str, list[HookBase]] | None] = {}

    def selects(self, spec: HookBase, name: str) -> bool:
        """Return whether calls of a function are observed for a spec."""
        return selects(spec, name)

    def run(
        self, function: Any, name: str, owners: Sequence[Owner], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call an observed function and return its result.

        Args:
            function: The function.
            name: Its name.
            owners: The module calls that it belongs to, one for each spec, in the order of the configuration.
            args: Its positional arguments.
            kwargs: Its keyword arguments.
        """
        raise NotImplementedError

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        try:
            known = self._known[func]
        except (KeyError, TypeError):  # a type error: a function that cannot be hashed
            known = self._look_up(func)
        if known is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        owners = self._owners(*known)
        kwargs = kwargs or {}
        return self.run(func, known[0], owners, args, kwargs) if owners else func(*args, **kwargs)

    def _look_up(self, function: Any) -> tuple[str, list[HookBase]] | None:
        """Return the name of a function and the specs that select it; None if no spec does."""
        name = function_name(function)
        specs = [] if name is None else [spec for spec in self.specs if self.selects(spec, name)]
        known = None if name is None or not specs else (name, specs)
        if len(self._known) >= _MOST_FUNCTIONS:  # code that creates functions must not fill the memory
            self._known.clear()
        if function.__hash__ is not None:
            self._known[function] = known
        return known

    def _owners(self, name: str, specs: Sequence[HookBase]) -> list[Owner]:
        """Return the module calls that a call of a function belongs to, and count the call in each."""
        frame = self._calling_module()
        owners = []
        for spec in specs if frame is not None else ():
            for running in reversed(self.running):
                observer = running.observers.get(spec.name)
                if observer is None:
                    continue
                if not spec.own or running.frame is frame:
                    number = running.counts[spec.name, name]
                    running.counts[spec.name, name] = number + 1
                    owners.append(Owner(running, observer, f"{name}.{number}"))
                break
        return owners

    def _calling_module(self) -> FrameType | None:
        """Return the frame of the innermost module that runs; None if one of `own_hooks` calls the function."""
        frame: FrameType | None = sys._getframe(3)
        while frame is not None and frame.f_code is not _CALL:
            frame = None if id(frame.f_code) in self._own_hooks else frame.f_back
        return frame

    def enter(self, running: RunningModule) -> None:
        """Start a call of a module."""
        while self.running and not _is_running(self.running[-1].frame):  # an interrupt ended it: PyTorch calls no hook
            self._end_last()
        running.has_pushed_mode = all(mode is not self for mode in _get_current_function_mode_stack())
        if running.has_pushed_mode:
            _push_mode(self)
        self.running.append(running)

    def leave(self, frame: FrameType | None) -> RunningModule | None:
        """End the call of the module that runs in a frame. Return None if its start was not seen."""
        if all(running.frame is not frame for running in self.running):
            return None
        while (running := self._end_last()).frame is not frame:
            pass
        return running

    def leave_all(self) -> None:
        """End all calls."""
        while self.running:
            self._end_last()
        if any(mode is self for mode in _get_current_function_mode_stack()):  # an interrupt ended `enter` half-way
            self._deactivate()

    def _end_last(self) -> RunningModule:
        running = self.running.pop()
        if running.has_pushed_mode:
            self._deactivate()
        return running

    def _deactivate(self) -> None:
        """Remove the mode from PyTorch's stack, and keep those that were activated after it."""
        if all(mode is not self for mode in _get_current_function_mode_stack()):
            # After an interrupt, the end of a `with` block of another mode removed this one instead of its own.
            if _get_current_function_mode_stack():
                _pop_mode()
            return
        others = []
        while (mode := _pop_mode()) is not self:
            others.append(mode)
        for mode in reversed(others):
            _push_mode(mode)


def module_frame() -> tuple[FrameType | None, bool]:
    """Return the frame of the module whose hook runs, and whether its forward pass raised an exception."""
    frame: FrameType | None = sys._getframe(1)
    inside = frame
    while frame is not None and frame.f_code is not _CALL:
        inside, frame = frame, frame.f_back
    return frame, inside is not None and inside.f_code.co_name != "inner"


def _is_running(frame: FrameType) -> bool:
    current: FrameType | None = sys._getframe(1)
    while current is not None and current is not frame:
        current = current.f_back
    return current is not None


def written_tensor(function: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """Return the tensor that a function changes in place, such as `add_`, `x[i] = y` or `relu(x, inplace=True)`; or None.

    The tensors of `out=` are not included.
    """
    if not args or not isinstance(args[0], Tensor):
        return None
    if name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or kwargs.get("inplace") is True:
        return args[0]
    if isinstance(function, FunctionType) and len(args) > 1:
        parameters = _parameters(function)
        if "inplace" in parameters[: len(args)] and args[parameters.index("inplace")] is True:
            return args[0]
    return None


def _parameters(function: FunctionType) -> list[str]:
    return [*inspect.signature(function).parameters]
