"""Copies of modules and arguments, which can be used without changing the originals."""

from __future__ import annotations

import copy
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinMethodType, CellType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..containers import leaves
from ..lazy_compiler import is_compiled_module
from ..nested import iter_tensors, map_tensors

_LOCKS = {type(make()): make for make in (threading.Lock, threading.RLock)}


class _DetachedCopies(TorchFunctionMode):
    """Lets `deepcopy` copy tensors of a graph, which it refuses otherwise. The copies are leaves."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor, memo = args
        memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]


def copy_modules(module: nn.Module) -> dict[nn.Module, nn.Module] | None:
    """Return copies of a module and its submodules, with their own parameters and buffers, and without hooks.

    None if an attribute cannot be copied.
    """
    try:
        copies: dict[nn.Module, nn.Module] = {part: object.__new__(type(part)) for part in module.modules()}
        known: dict[int, Any] = {id(part): new for part, new in copies.items()}
        with _DetachedCopies():
            for parameter in module.parameters():
                new = nn.Parameter(parameter.detach().clone(), parameter.requires_grad)
                known[id(parameter)] = new
                vars(new).update(
                    copy.deepcopy(vars(parameter), known)
                )  # such as `main_grad`, to which a backward pass adds
            for part, copied in copies.items():
                if is_compiled_module(part):  # its calls are replayed
                    copied.__dict__.update(vars(nn.Module()))
                    continue
                for name, value in part.__dict__.items():
                    is_hooks = name.endswith("_hooks") and isinstance(value, OrderedDict)
                    copied.__dict__[name] = OrderedDict() if is_hooks else _copy(value, known)
                copied.__dict__["_compiled_call_impl"] = None
    except Exception:  # copying a custom attribute can raise anything
        return None
    return copies


def copy_arguments(arguments: dict[str, Any], copy_tensor: Callable[[str, Tensor], Tensor]) -> dict[str, Any] | None:
    """Return a copy of the arguments of a module. Tensors in other objects, such as caches, are copied.

    None if an argument cannot be copied, or is a module.

    Args:
        arguments: The arguments by name.
        copy_tensor: Takes the path of a tensor and the tensor, and returns its copy.
    """
    if any(True for _ in leaves(arguments, lambda value: isinstance(value, nn.Module))):
        return None
    try:
        new = map_tensors(arguments, copy_tensor)
        known: dict[int, Any] = {id(tensor): tensor for _, tensor in iter_tensors(new)}
        with _DetachedCopies():
            return {name: _copy(value, known) for name, value in new.items()}
    except Exception:  # copying a custom object can raise anything
        return None


def _copy(value: Any, known: dict[int, Any]) -> Any:
    """Return a copy of a value. `known` has the copies of objects by identity, like the argument of `deepcopy`."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, FunctionType):
        return _copy_function(value, known)
    if isinstance(value, weakref.ref):
        return weakref.ref(known[id(value())]) if id(value()) in known else value
    if isinstance(value, BuiltinMethodType) and not isinstance(value.__self__, ModuleType | None):
        return getattr(_copy(value.__self__, known), value.__name__)  # such as `append` of a list
    if type(value) in _LOCKS:
        return _LOCKS[type(value)]()
    if isinstance(value, nn.Module):
        raise TypeError("a module outside of the copied one")
    return copy.deepcopy(value, known)


def _copy_function(function: FunctionType, known: dict[int, Any]) -> FunctionType:
    """Return a copy of a function with copies of the objects that it refers to, such as the module in a replaced `forward`."""
    if hasattr(function, "_torchdynamo_orig_callable"):
        raise TypeError("a compiled function")
    cells = tuple(CellType() for _ in function.__closure__ or ())
    new = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells or None)
    known[id(function)] = new
    for cell, old in zip(cells, function.__closure__ or (), strict=True):
        cell.cell_contents = _copy(old.cell_contents, known)
    if function.__defaults__:
        new.__defaults__ = tuple(_copy(value, known) for value in function.__defaults__)
    new.__kwdefaults__ = {name: _copy(value, known) for name, value in (function.__kwdefaults__ or {}).items()}
    return new
