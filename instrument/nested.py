"""Tensors in nested values: iterate over them by path, and replace some of them.

A path names a tensor inside a value: `""` is the value itself, `"0"` an item of a tuple or list, `"logits"` an
entry of a dict or a field of a dataclass or named tuple, `"1.0"` an item of an item.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from .errors import ConfigError, Problem


def iter_tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the path and the tensor of every tensor in a nested value, in order."""
    if isinstance(value, Tensor):
        yield path, value
        return
    for key, child in _children(value):
        yield from iter_tensors(child, f"{path}.{key}" if path else key)


def map_tensors(value: Any, fn: Callable[[str, Tensor], Tensor], path: str = "") -> Any:
    """Return the value with each tensor replaced by `fn(path, tensor)`.

    If `fn` returns all tensors unchanged, the result is the same object as `value`. Otherwise containers are copied,
    not modified.

    Args:
        value: A tensor, or tensors in tuples, lists, mappings and dataclasses.
        fn: Takes the path and the tensor, and returns the new tensor.
        path: The path of `value` itself.
    """
    if isinstance(value, Tensor):
        return fn(path, value)
    return map_children(value, lambda key, child: map_tensors(child, fn, f"{path}.{key}" if path else key))


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((str(key), child) for key, child in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from zip(value._fields, value, strict=True)
    elif isinstance(value, list | tuple):
        yield from ((str(i), child) for i, child in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (field.name for field in dataclasses.fields(value))
        yield from ((name, getattr(value, name)) for name in fields if hasattr(value, name))


def map_children(value: Any, fn: Callable[[str, Any], Any]) -> Any:
    """Return the value with each child replaced by `fn(key, child)`; the same object if no child changes."""
    old = list(_children(value))
    new = [fn(key, child) for key, child in old]
    if all(child is before for child, (_, before) in zip(new, old, strict=True)):
        return value
    if isinstance(value, tuple):
        # A named tuple is constructed from separate fields; torch.return_types and plain tuples from one sequence.
        return type(value)(*new) if hasattr(value, "_fields") else type(value)(new)
    if isinstance(value, Mapping) and not isinstance(value, MutableMapping):
        return type(value)(dict(zip(value, new, strict=True)))  # type: ignore[call-arg]
    copied = copy.copy(value)
    if isinstance(value, Mapping):
        for key, child in zip(value, new, strict=True):
            if child is not value[key]:
                copied[key] = child
    elif isinstance(value, list):
        copied[:] = new
    else:
        for (name, _), child in zip(old, new, strict=True):
            object.__setattr__(copied, name, child)  # also works for frozen dataclasses
    return copied


def join_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Combine positional and keyword arguments. Their paths are `0`, `1`, ..., and the names."""
    return {**{str(i): value for i, value in enumerate(args)}, **kwargs}


def split_arguments(joined: Mapping[str, Any], positional: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the first `positional` of combined arguments as a tuple, and the others as keyword arguments."""
    values = list(joined.items())
    return tuple(value for _, value in values[:positional]), dict(values[positional:])


def shapes(value: Any) -> str:
    """Return the shapes of the tensors of a nested value for messages, such as `[64, 1, 28, 28]`."""
    found = [str([*shape_of(tensor)]) for _, tensor in iter_tensors(value)]
    return ", ".join(found) if found else type(value).__name__


def structure(value: Any) -> str:
    """Return the structure of a nested value for messages, such as `(float32 [64, 1, 28, 28], {'id': int64 [64]})`."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {[*shape_of(value)]}"
    children = [(key, structure(child)) for key, child in islice(_children(value), 9)]
    texts = [text for _, text in children[:8]] + ["..."] * (len(children) > 8)
    if isinstance(value, Mapping):
        texts = [f"{key!r}: {text}" for key, text in children[:8]] + texts[8:]
        return f"{{{', '.join(texts)}}}"
    if isinstance(value, list):
        return f"[{', '.join(texts)}]"
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"({', '.join(texts)})"
    if children:
        texts = [f"{key}={text}" for key, text in children[:8]] + texts[8:]
        return f"{type(value).__name__}({', '.join(texts)})"
    return type(value).__name__


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Return the shape of a tensor; for a nested tensor, the shape after padding its components to the same size."""
    if not tensor.is_nested:
        return tuple(tensor.shape)
    parts = [part.shape for part in tensor.unbind()]
    return (len(parts), *map(max, zip(*parts, strict=True)))


def number_of_samples(batch: Any) -> int:
    """Return the number of samples in a batch: the size of dimension 0 of its tensors, at any depth.

    Zero-dimensional tensors and values other than tensors are ignored. For a packed sequence, the sequences are
    counted.

    Args:
        batch: A batch of the data loader: a tensor, or tensors in tuples, lists, mappings and dataclasses.

    Raises:
        ConfigError: No tensor has a dimension 0, or their sizes differ.
    """
    sizes = list(_sizes(batch))
    counts = {count for _, count in sizes}
    if len(counts) == 1:
        return counts.pop()
    if counts:
        message = "the tensors of a batch differ in dimension 0, so its number of samples is ambiguous"
        given = ", ".join(description for description, _ in sizes)
    else:
        message = "a batch contains no tensor with a dimension 0, so its number of samples is unknown"
        given = type(batch).__name__
    raise ConfigError(
        Problem(
            "data.dataset",
            f"{message}: {given}",
            allowed="tensors [samples, ...] with the same number of samples",
            fix="pass values that all samples share as numbers, zero-dimensional tensors, or arguments of the task",
        )
    )


def _sizes(value: Any, path: str = "") -> Iterator[tuple[str, int]]:
    """Yield a description (path and shape) and the number of samples for each tensor of a batch."""
    if isinstance(value, PackedSequence):  # a named tuple whose tensors have time steps, not samples, in dimension 0
        yield f"{path or 'the batch'} (packed)", int(value.batch_sizes[0])
    elif isinstance(value, Tensor):
        if value.dim():
            yield f"{path or 'the batch'} {[*shape_of(value)]}", value.size(0)
    else:
        for key, child in _children(value):
            yield from _sizes(child, f"{path}.{key}" if path else key)


def to_device(value: Any, device: torch.device) -> Any:
    """Return the value with every tensor on the device.

    An object that is no container but has a method `to`, such as a batch of torch_geometric, moves itself. A CUDA device
    copies from pinned memory, and the host does not wait for it. The lengths of a packed sequence stay on the CPU, as
    PyTorch requires.
    """
    if not isinstance(value, Tensor | PackedSequence):
        is_container = isinstance(value, Mapping | tuple | list) or dataclasses.is_dataclass(value)
        if not is_container and callable(getattr(value, "to", None)):
            return value.to(device)
        return map_children(value, lambda _, child: to_device(child, device))
    if _reads_pinned_memory(device) and _can_be_pinned(value.data):
        value = value.pin_memory()
    return value.to(device, non_blocking=device.type != "cpu")


def _can_be_pinned(tensor: Tensor) -> bool:
    """Return whether a tensor is in CPU memory, with an address of its own for each element."""
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or tensor.is_nested:
        return False
    return all(stride or size == 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _reads_pinned_memory(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_available()
