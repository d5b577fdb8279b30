"""Tensors in nested values: iterate over them by path, and replace some of them.

A path names a tensor inside a value: `""` is the value itself, `"0"` an item of a tuple or list, `"logits"` an
entry of a dict or a field of a dataclass or named tuple, `"1.0"` an item of an item.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from ..errors import ConfigError, Problem
from .containers import entries, is_modifiable, leaves, map_leaves

MAX_ENTRIES, MAX_CONTAINERS = 8, 30  # of a nested value in a message
_TENSORS = (Tensor, PackedSequence)


def iter_tensors(value: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the path and the tensor of every tensor in a nested value, in order.

    A container that occurs several times has the path of its first occurrence.
    """
    return leaves(value, _is_tensor, path)


def map_tensors(value: Any, fn: Callable[[str, Tensor], Tensor], *, in_place: Any = ()) -> Any:
    """Return the value with each tensor replaced by `fn(path, tensor)`.

    If `fn` returns all tensors unchanged, the result is the same object as `value`. Otherwise containers are copied,
    not modified, except those in `in_place`.

    Args:
        value: A tensor, or tensors in tuples, lists, mappings, dataclasses and similar objects; see
            `instrument.values.containers.entries`.
        fn: Takes the path and the tensor, and returns the new tensor.
        in_place: Values whose containers other code reads. They are changed in place where they allow it.
    """
    return map_leaves(value, fn, _is_tensor, in_place=in_place)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def returned_value(output: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the output of a module; if that is None, the containers among its arguments, to which it may have written.

    A single container has the paths that it would have as the output. Several have the paths of the arguments.
    """
    if output is not None:
        return output
    containers = {name: value for name, value in join_arguments(args, kwargs).items() if is_modifiable(value)}
    written = {name: value for name, value in containers.items() if next(iter_tensors(value), None) is not None}
    return next(iter(written.values())) if len(written) == 1 else written or None


def join_arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Combine positional and keyword arguments. Their paths are `0`, `1`, ..., and the names."""
    return {**{str(i): value for i, value in enumerate(args)}, **kwargs}


def split_arguments(joined: Mapping[str, Any], positional: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the first `positional` of combined arguments as a tuple, and the others as keyword arguments."""
    values = list(joined.items())
    return tuple(value for _, value in values[:positional]), dict(values[positional:])


def shapes(value: Any) -> str:
    """Return the shapes of the tensors of a nested value for messages, such as `[64, 1, 28, 28]`."""
    texts = [str([*shape_of(tensor)]) for _, tensor in iter_tensors(value)]
    return ", ".join(texts) if texts else type(value).__name__


def structure(value: Any) -> str:
    """Return the structure of a nested value for messages, such as `(float32 [64, 1, 28, 28], {'id': int64 [64]})`."""
    return _structure(value, set())


def _structure(value: Any, visited: set[int]) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {[*shape_of(value)]}"
    items = entries(value)[: MAX_ENTRIES + 1]
    if not items and not isinstance(value, Mapping | tuple | list):
        return type(value).__name__
    if id(value) in visited or len(visited) >= MAX_CONTAINERS:
        return "..."
    visited.add(id(value))
    children = [(key, _structure(child, visited)) for key, child in items[:MAX_ENTRIES]]
    texts = [text for _, text in children]
    more = ["..."] * (len(items) > MAX_ENTRIES)
    if isinstance(value, Mapping):
        return f"{{{', '.join([f'{str(key)!r}: {text}' for key, text in children] + more)}}}"
    if isinstance(value, list):
        return f"[{', '.join(texts + more)}]"
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return f"({', '.join(texts + more)})"
    return f"{type(value).__name__}({', '.join([f'{key}={text}' for key, text in children] + more)})"


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

    Raises:
        ConfigError: No tensor has a dimension 0, or their sizes differ.
    """
    sizes = [*_sizes(batch)]
    counts = {count for _, count in sizes}
    if len(counts) == 1:
        return counts.pop()
    message = (
        f"a batch contains no tensor with a dimension 0, so its number of samples is unknown: {type(batch).__name__}"
    )
    if counts:
        message = "the tensors of a batch differ in dimension 0, so its number of samples is ambiguous: "
        message += ", ".join(description for description, _ in sizes)
    allowed = "tensors [samples, ...] with the same number of samples"
    fix = "pass values that all samples share as numbers, zero-dimensional tensors, or arguments of the task"
    raise ConfigError(Problem("data.dataset", message, allowed=allowed, fix=fix))


def _sizes(batch: Any) -> Iterator[tuple[str, int]]:
    """Yield a description (path and shape) and the number of samples for each tensor of a batch."""
    for path, value in leaves(batch, lambda value: isinstance(value, _TENSORS)):
        if isinstance(value, PackedSequence):  # its tensors have time steps, not samples, in dimension 0
            yield f"{path or 'the batch'} (packed)", int(value.batch_sizes[0])
        elif value.dim():
            yield f"{path or 'the batch'} {[*shape_of(value)]}", value.size(0)


def to_device(value: Any, device: torch.device) -> Any:
    """Return the value with every tensor on the device.

    An object that is not a container but has a method `to`, such as a batch of torch_geometric, moves itself. A CUDA device
    copies from pinned memory, and the host does not wait for it. The lengths of a packed sequence stay on the CPU, as
    PyTorch requires.
    """
    return map_leaves(value, lambda _, leaf: _on_device(leaf, device), _moves_itself)


def _moves_itself(value: Any) -> bool:
    """Return whether a value is a tensor or has a method that moves it, and is not another container."""
    if isinstance(value, _TENSORS):
        return True
    is_container = isinstance(value, Mapping | tuple | list) or dataclasses.is_dataclass(value)
    return not is_container and callable(getattr(value, "to", None))


def _on_device(value: Any, device: torch.device) -> Any:
    if not isinstance(value, _TENSORS):
        return value.to(device)
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
