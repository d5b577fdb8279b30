"""Tensors inside nested values: what is at which path, and the same value with some of them changed.

A path names a tensor inside a value: `""` is the value itself, `"0"` an item of a tuple or list, `"logits"` an
entry of a dict or a field of a dataclass or named tuple, `"1.0"` an item of an item.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a nested value with its path, in the order in which they stand."""
    if isinstance(value, Tensor):
        yield path, value
        return
    for key, child in _children(value):
        yield from leaves(child, f"{path}.{key}" if path else key)


def map_leaves(value: Any, fn: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """The value with `fn(path, tensor)` in the place of each tensor.

    Where `fn` gives every tensor back as it is, the result is the very same object, so that looking changes
    nothing. Otherwise containers are copied, never written to.
    """
    if isinstance(value, Tensor):
        return fn(path, value)
    changed: dict[str, Any] = {}
    for key, child in _children(value):
        new = map_leaves(child, fn, f"{path}.{key}" if path else key)
        if new is not child:
            changed[key] = new
    return _rebuilt(value, changed) if changed else value


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), child) for key, child in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, list | tuple):
        yield from ((str(i), child) for i, child in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))


def _rebuilt(value: Any, changed: dict[str, Any]) -> Any:
    if isinstance(value, tuple):
        items = [changed.get(key, child) for key, child in _children(value)]
        # A named tuple takes its fields one by one; torch.return_types and plain tuples take one sequence.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    new = copy.copy(value)
    if isinstance(value, Mapping):
        for key in value:
            if str(key) in changed:
                new[key] = changed[str(key)]
    elif isinstance(value, list):
        for key, child in changed.items():
            new[int(key)] = child
    else:
        for key, child in changed.items():
            object.__setattr__(new, key, child)
    return new


def shapes(value: Any) -> str:
    """The shapes of the tensors of a nested value, for messages: `[64, 1, 28, 28]`, or a list of them."""
    found = [str(list(tensor.shape)) for _, tensor in leaves(value)]
    return ", ".join(found) if found else type(value).__name__


def to_device(value: Any, device: torch.device) -> Any:
    """The value with every tensor on that device."""
    return map_leaves(value, lambda _, tensor: tensor.to(device, non_blocking=True))
