"""The calls of torch functions inside modules: their names, their numbers, and the module call that each belongs to.

A `TorchFunctionMode` sees every torch function that Python code calls. It is active only inside the modules that hooks of
kind `function` or `function_grad` match, and PyTorch disables it while it handles a call. A function that is written in
Python is therefore seen as one call, without the functions that it calls. Functions that compiled code calls are not
observed: with most backends, it calls none of the functions in its source.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, FunctionType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch._C import _get_function_stack_at, _len_torch_function_stack
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.hooks import RemovableHandle

from ..config.base import HookBase, ObservationSpec
from ..fields.globs import matches
from ..runtime.lazy_compiler import compiler_entries, is_compiled_module
from ..tables.kinds import ATTENTION_FUNCTIONS, ATTENTION_ROLES
from ..values.nested import iter_tensors

_MAX_FUNCTIONS = 10_000
_CALL = nn.Module._call_impl.__code__
# Reads and writes of properties, methods that change no value, and functions whose result has no values yet. The hooks of this package
# call some of them where a mode of another probe is active.
_IGNORED = frozenset(
    {"__get__", "__set__", "__delete__", "is_inference", "is_neg", "storage_offset", "stride", "untyped_storage"}
    | {"detach_", "register_hook", "requires_grad_", "retain_grad", "set_", "share_memory_"}
    | {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
)
RESHAPING = frozenset(  # functions that change the shape or the strides of a tensor in place, and none of its values
    {"as_strided_", "resize_", "resize_as_", "squeeze_", "swapaxes_", "swapdims_", "t_", "transpose_", "unsqueeze_"}
)
Pause = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]


def function_name(function: Any) -> str | None:
    """Return the name of a torch function, such as `softmax`; None for functions that are not observed."""
    name = getattr(function, "__name__", None)
    return None if not isinstance(name, str) or name in _IGNORED else name.partition(".")[0]


def selects(spec: HookBase, name: str) -> bool:
    """Return whether a spec selects the functions with this name. Without `functions`, a spec selects all that its role has."""
    if spec.tensor_role in ATTENTION_ROLES and name not in ATTENTION_FUNCTIONS:
        return False
    return not spec.functions or any(matches(pattern, name) for pattern in spec.functions)


@dataclass(slots=True, eq=False)
class RunningModule:
    """A call of a module that is running."""

    frame: FrameType
    observers: Mapping[str, Any]  # of its functions, by the name of the spec
    is_paused: bool = False  # whether the mode is not active during this call
    counts: dict[SelectedFunction, int] = field(default_factory=dict)  # calls so far of each function for each spec
    compiled: tuple[Any, ...] = ()  # the observers whose functions were called by compiled code
    pause_reason: str | None = None  # why the mode was paused in it, if it was
    has_switched_mode: bool = False  # whether the mode became active, or inactive, when this call started


class SelectedFunction(NamedTuple):
    """A function that a spec selects; `own`: only where a matched module calls it itself."""

    spec: str
    function: str
    own: bool


class ObservedFunction(NamedTuple):
    """What is known of a function that any spec selects."""

    name: str
    selections: tuple[SelectedFunction, ...]
    is_plain: bool  # whether all specs only record complete results
    paths: list[str]  # of its calls, as far as they are known: `softmax.0`, `softmax.1`, ...


class Owner(NamedTuple):
    """The call of a module that a function call belongs to, for one spec, its observer, and the path of the function call."""

    running: Any
    observer: Any
    path: str


class FunctionMode(TorchFunctionMode):
    """Observes the torch functions that one thread calls in running modules.

    A call belongs to the innermost running module that the same spec matched. The functions that `own_hooks` call are not observed:
    the hooks of this package, and those that shard parameters.
    """

    def __init__(self, specs: Sequence[HookBase], own_hooks: Iterable[Callable[..., Any]]) -> None:
        super().__init__()
        self.specs = specs
        self.running: list[Any] = []  # each a `RunningModule`, or an object with its attributes
        # By the `id` of a code object: whether compiled code runs in it, or one of `own_hooks`.
        self.is_compiled_code = {id(hook.__code__): False for hook in own_hooks}
        self.knows_compiler = False  # whether `is_compiled_code` has the code of the compiler
        self.known: dict[Any, ObservedFunction | None] = {}  # functions, None if no spec selects it

    def selects(self, spec: HookBase, name: str) -> bool:
        """Return whether calls of a function are observed for a spec."""
        return selects(spec, name)

    def run(
        self, function: Any, name: str, owners: Sequence[Owner], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Call an observed function of some module calls, one for each spec, and return its result."""
        raise NotImplementedError

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_dynamo_compiling():  # the compiler traces this method, and finds nothing to add
            return func(*args, **(kwargs or {}))
        return self.observe(func, args, kwargs)

    def observe(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None) -> Any:
        """Call a function, and observe it if a spec selects it."""
        try:
            known = self.known[function]
        except (KeyError, TypeError):  # a type error: a function that cannot be hashed
            known = self._look_up(function)
        kwargs = kwargs or {}
        if known is None or is_compiling():
            return function(*args, **kwargs)
        owners = self._owners(known.selections)
        return self.run(function, known.name, owners, args, kwargs) if owners else function(*args, **kwargs)

    def _look_up(self, function: Any) -> ObservedFunction | None:
        """Return what is known of a function; None if no spec selects it."""
        self._know_compiler()
        name = function_name(function)
        specs = [] if name is None else [spec for spec in self.specs if self.selects(spec, name)]
        known = None
        if name is not None and specs:
            selections = tuple(SelectedFunction(spec.name, name, spec.own) for spec in specs)
            are_records = all(isinstance(spec, ObservationSpec) for spec in specs)
            is_plain = are_records and all(spec.tensor_role == "output" and spec.path is None for spec in specs)
            known = ObservedFunction(name, selections, is_plain, [])
        if len(self.known) >= _MAX_FUNCTIONS:  # code that creates functions must not fill the memory
            self.known.clear()
        if function.__hash__ is not None:
            self.known[function] = known
        return known

    def _know_compiler(self) -> None:
        entries = compiler_entries()
        self.is_compiled_code.update(entries)
        self.knows_compiler = bool(entries)

    def _owners(self, selections: Iterable[SelectedFunction]) -> list[Owner]:
        """Return the module calls that a call of a function belongs to, and count the call in each."""
        frame, is_compiled = self._calling_module()
        owners = []
        for selection in selections if frame is not None else ():
            for running in reversed(self.running):
                observer = running.observers.get(selection.spec)
                if observer is None:
                    continue
                if is_compiled:
                    running.compiled = tuple({*running.compiled, observer})
                elif not selection.own or running.frame is frame:
                    number = running.counts.get(selection, 0)
                    running.counts[selection] = number + 1
                    owners.append(Owner(running, observer, f"{selection.function}.{number}"))
                break
        return owners

    def _calling_module(self) -> tuple[FrameType | None, bool]:
        """Return the frame of the innermost module that runs, and whether compiled code calls the function."""
        frame: FrameType | None = sys._getframe(1)
        is_compiled = False
        while frame is not None and frame.f_code is not _CALL:
            known = self.is_compiled_code.get(id(frame.f_code))
            if known is False:
                return None, False
            is_compiled |= known is True
            frame = frame.f_back
        return frame, is_compiled

    def is_observed_by(self, observers: Collection[Any]) -> bool:
        """Whether any thread is in a call of a module with one of these observers."""
        frames = [each.frame for each in self.running[:] if not set(observers).isdisjoint(each.observers.values())]
        return any(_is_running(frame, top) for frame in frames for top in sys._current_frames().values())

    def enter(self, running: Any) -> None:
        # PyTorch calls no hook after an interrupt.
        while self.running and not _is_running(self.running[-1].frame, sys._getframe()):
            self._end_last()
        self._know_compiler()
        running.has_switched_mode = self.is_active() == running.is_paused
        if running.has_switched_mode:
            self._switch(activate=not running.is_paused)
        self.running.append(running)

    def pause(self, frame: FrameType, reason: str | None) -> None:
        """Start a call of a module during which the mode is not active; see `register_pauses`."""
        if self.running:
            self.running[-1].pause_reason = reason
            self.enter(RunningModule(frame, {}, is_paused=True))

    def resume(self) -> None:
        if self.running and self.running[-1].is_paused:
            self._end_last()

    def leave(self, frame: FrameType | None, *, is_paused: bool = False) -> Any:
        """End the call, or the pause, of the module that runs in a frame. Return None if its start was not seen."""
        for ended in reversed(self.running):
            if ended.frame is frame and ended.is_paused is is_paused:
                while self._end_last() is not ended:
                    pass
                return ended
        return None

    def leave_all(self) -> None:
        while self.running:
            self._end_last()
        if self.is_active():  # an interrupt ended `enter` half-way
            self._switch(activate=False)

    def _end_last(self) -> Any:
        running = self.running.pop()
        if running.has_switched_mode:
            self._switch(activate=running.is_paused)
        return running

    def is_active(self) -> bool:
        """Whether the mode is in PyTorch's stack."""
        if not (depth := _len_torch_function_stack()):
            return False
        return _get_function_stack_at(depth - 1) is self or self in _get_current_function_mode_stack()

    def _switch(self, *, activate: bool) -> None:
        """Add the mode to PyTorch's stack, or remove it and keep those that were activated after it."""
        if activate:
            _push_mode(self)
            return
        if not self.is_active():
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


def _is_running(frame: FrameType, innermost: FrameType | None) -> bool:
    """Return whether a frame is in the stack of a thread, given the innermost frame of the thread."""
    while innermost is not None and innermost is not frame:
        innermost = innermost.f_back
    return innermost is not None


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


def _parameters(function: FunctionType) -> tuple[str, ...]:
    """Return the names of the positional parameters. The wrappers of operators such as `**` wrap a function in C."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return () if code is None else code.co_varnames[: code.co_argcount]


def register_pauses(
    modules: Iterable[nn.Module], pause: Pause, end: Callable[..., None], resume: Callable[..., None]
) -> Iterator[RemovableHandle]:
    """Register the hooks that pause a mode where it would change what a module computes.

    `nn.TransformerEncoder` converts a padded batch to a nested tensor, and `nn.MultiheadAttention` runs one fused function, unless
    a mode is active. With a mode, padded positions would have other values, and attention would refuse nested tensors. A
    compiled module would be compiled again with the mode. `pause` and `end` are hooks around such a module inside the modules in
    which the mode is active, and `resume` is one of the first layer of an encoder, which has chosen its path by then.
    """
    for part in {part: None for module in modules for part in module.modules()}:
        is_encoder = isinstance(part, nn.TransformerEncoder)
        if is_encoder or isinstance(part, nn.MultiheadAttention) or is_compiled_module(part):
            yield part.register_forward_pre_hook(pause, with_kwargs=True)
            yield part.register_forward_hook(end, prepend=True, always_call=True)
        if is_encoder:
            yield from (layer.register_forward_pre_hook(resume) for layer in cast(nn.ModuleList, part.layers)[:1])


def register_pauses_of(mode: FunctionMode, modules: Iterable[nn.Module]) -> Iterator[RemovableHandle]:
    """Register the hooks that pause one mode in modules and their submodules."""

    def pause(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if (frame := module_frame()[0]) is not None and needs_pause(module, args, kwargs):
            mode.pause(frame, None)

    def end(*_: Any) -> None:
        mode.leave(module_frame()[0], is_paused=True)

    return register_pauses(modules, pause, end, lambda *_: mode.resume())


def needs_pause(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a mode could change what a module computes: it is compiled, or may take PyTorch's fast path.

    The fast path is for evaluations without gradients. Some of PyTorch's conditions are not checked here.
    """
    if is_compiled_module(module):
        return True
    if module.training or not torch.backends.mha.get_fastpath_enabled() or torch.is_autocast_enabled():
        return False
    attention: Any = module.layers[0].self_attn if isinstance(module, nn.TransformerEncoder) else module
    tensors = iter_tensors((attention.in_proj_weight, args, kwargs))
    if torch.is_grad_enabled() and any(tensor.requires_grad for _, tensor in tensors):
        return False
    if module is not attention:
        return True
    inputs = [*args[:3], *(kwargs[name] for name in ("query", "key", "value") if name in kwargs)]
    return bool(attention.batch_first) and all(each is inputs[0] for each in inputs)
