"""Copies of modules and arguments, which can be used without changing the originals."""

from __future__ import annotations

import copy
import copyreg
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from types import BuiltinFunctionType, BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType, NoneType
from typing import Any

import torch
from torch import Tensor, nn

from ..runtime.lazy_compiler import is_compiled_module
from ..values.nested import iter_tensors, map_tensors

_UNCHANGED = (
    *(type, ModuleType, BuiltinFunctionType, NoneType, torch.dtype, torch.device),
    *(bool, int, float, complex, str, bytes, range),
)
_LOCKS = {type(make()): make for make in (threading.Lock, threading.RLock)}


def copy_modules(module: nn.Module, *, share_parameters: bool = False) -> dict[nn.Module, nn.Module]:
    """Return copies of a module and its submodules, with buffers and parameters of their own or shared ones, not compiled, without hooks.

    Raises:
        Exception: An attribute cannot be copied. It can raise any exception.
    """
    copies: dict[nn.Module, nn.Module] = {part: object.__new__(type(part)) for part in module.modules()}
    copies.update({part: copies[part._orig_mod] for part in copies if is_compiled_module(part)})  # type: ignore[index]
    known: dict[int, Any] = {id(part): new for part, new in copies.items()}
    if share_parameters:
        known.update((id(parameter), parameter) for parameter in module.parameters())
    for parameter in () if share_parameters else module.parameters():
        new = known[id(parameter)] = copy.deepcopy(parameter)
        vars(new).update(_copy(vars(parameter), known))  # such as `main_grad`, to which a backward pass adds
    for part, copied in copies.items():
        if is_compiled_module(part):
            continue
        for name, value in part.__dict__.items():
            is_hooks = name.endswith("_hooks") and isinstance(value, OrderedDict)
            if name != "_compiled_call_impl":
                copied.__dict__[name] = OrderedDict() if is_hooks else _copy(value, known)
    return copies


def copy_arguments(arguments: dict[str, Any], copy_tensor: Callable[[str, Tensor], Tensor]) -> dict[str, Any]:
    """Return a copy of the arguments of a module. Tensors in other objects, such as caches, are copied.

    Raises:
        Exception: An argument cannot be copied, or contains a module.
    """
    new = map_tensors(arguments, copy_tensor)
    known: dict[int, Any] = {id(tensor): tensor for _, tensor in iter_tensors(new)}
    return {name: _copy(value, known) for name, value in new.items()}


def _copy(value: Any, known: dict[int, Any]) -> Any:
    """Return a copy of a value, like `deepcopy` with the memo `known`, but also of functions and of tensors of a graph."""
    if id(value) in known:
        return known[id(value)]
    known.setdefault(id(known), []).append(value)  # as `deepcopy`: the identity stays that of this object
    new = known[id(value)] = _new_copy(value, known)
    return new


def _new_copy(value: Any, known: dict[int, Any]) -> Any:
    copy_part = partial(_copy, known=known)
    match value:
        case nn.Module():
            raise TypeError("a module outside of the copied one")
        case Tensor():
            return value.detach().clone().requires_grad_(value.requires_grad)
        case FunctionType():
            return _copy_function(value, known)
        case MethodType():
            return MethodType(copy_part(value.__func__), copy_part(value.__self__))
        case BuiltinMethodType() if not isinstance(value.__self__, ModuleType | None):  # such as `append` of a list
            return getattr(copy_part(value.__self__), value.__name__)
        case weakref.ref():
            return weakref.ref(known[id(value())]) if id(value()) in known else value
    if type(value) in (tuple, list, dict):
        return copy._deepcopy_dispatch[type(value)](value, known, _copy)  # type: ignore[attr-defined]
    if type(value) in _LOCKS:
        return _LOCKS[type(value)]()
    if isinstance(value, _UNCHANGED) or type(value) is object:
        return value
    if hasattr(value, "__deepcopy__"):
        return value.__deepcopy__(known)
    reduce = copyreg.dispatch_table.get(type(value))
    how = value.__reduce_ex__(4) if reduce is None else reduce(value)
    return value if isinstance(how, str) else copy._reconstruct(value, known, *how, deepcopy=_copy)  # type: ignore[attr-defined]


def _copy_function(function: FunctionType, known: dict[int, Any]) -> FunctionType:
    """Return a copy of a function with copies of the objects that it refers to, such as the module in a replaced `forward`."""
    if hasattr(function, "_torchdynamo_orig_callable"):  # it is compiled
        return _copy(function._torchdynamo_orig_callable, known)  # type: ignore[no-any-return]
    if not (function.__closure__ or function.__defaults__ or function.__kwdefaults__):
        return function
    cells = tuple(CellType() for _ in function.__closure__ or ())
    new = FunctionType(function.__code__, function.__globals__, function.__name__, None, cells or None)
    known[id(function)] = new
    for cell, old in zip(cells, function.__closure__ or (), strict=True):
        cell.cell_contents = _copy(old.cell_contents, known)
    if function.__defaults__:
        new.__defaults__ = tuple(_copy(value, known) for value in function.__defaults__)
    new.__kwdefaults__ = {name: _copy(value, known) for name, value in (function.__kwdefaults__ or {}).items()}
    return new
