"""Copies of modules and arguments, which can be used without changing the originals."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import CellType, FunctionType
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..containers import leaves
from ..nested import iter_tensors

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
    """Return copies of a module and its submodules, which share the parameters and have no hooks.

    None if an attribute cannot be copied.
    """
    copies: dict[nn.Module, nn.Module] = {part: part.__new__(type(part)) for part in module.modules()}
    known: dict[int, Any] = {id(part): new for part, new in copies.items()}
    known |= {id(parameter): parameter for parameter in module.parameters()}
    try:
        with _DetachedCopies():
            for part, new in copies.items():
                for name, value in part.__dict__.items():
                    is_hooks = name.endswith("_hooks") and isinstance(value, OrderedDict)
                    new.__dict__[name] = OrderedDict() if is_hooks else _copy(value, known)
                new.__dict__["_compiled_call_impl"] = None
    except Exception:  # copying a custom attribute can raise anything
        return None
    return copies


def copy_arguments(arguments: dict[str, Any]) -> dict[str, Any] | None:
    """Return a copy of the arguments of a module with the same tensors. Tensors in other objects, such as caches, are copied.

    None if an argument cannot be copied, or is a module.
    """
    if any(True for _ in leaves(arguments, lambda value: isinstance(value, nn.Module))):
        return None
    known: dict[int, Any] = {id(tensor): tensor for _, tensor in iter_tensors(arguments)}
    try:
        with _DetachedCopies():
            return {name: _copy(value, known) for name, value in arguments.items()}
    except Exception:  # copying a custom object can raise anything
        return None


def _copy(value: Any, known: dict[int, Any]) -> Any:
    """Return a copy of a value. `known` has the copies of objects by identity, like the argument of `deepcopy`."""
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, FunctionType) and value.__closure__:  # such as a `forward` that uses the module
        cells = tuple(CellType() for _ in value.__closure__)
        new = FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, cells)
        new.__kwdefaults__ = value.__kwdefaults__
        known[id(value)] = new
        for cell, old in zip(cells, value.__closure__, strict=True):
            cell.cell_contents = _copy(old.cell_contents, known)
        return new
    if type(value) in _LOCKS:
        return _LOCKS[type(value)]()
    if isinstance(value, nn.Module):
        raise TypeError("a module outside of the copied one")
    return copy.deepcopy(value, known)
