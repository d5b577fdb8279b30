"""Observes the batches of data loaders, while a relation reads them: fingerprints of their tensors, and the loader."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import dataloader

from ..stats.fingerprint import fingerprint
from ..values.nested import iter_tensors

MAX_ELEMENTS = 65_536  # of a tensor, evenly spaced, that a fingerprint reads
_KNOWN = ("torch", "accelerate")  # packages whose samplers have a length without side effects, and repeat no batch
_Iterator = dataloader._BaseDataLoaderIter
_replaced: list[
    tuple[Callable[[Any], Any], Callable[[Any], Any]]
] = []  # the function before, and the one that observes
_observers: list[Callable[[LoaderBatch], None]] = []


class LoaderBatch(NamedTuple):
    """A batch of a data loader.

    Attributes:
        iterator: Identifies the pass over the data.
        number: The index of the batch in its pass, from 0.
        workers: The number of worker processes.
        batches: The number of batches of a pass; None if it is unknown, as for samplers that are not of PyTorch.
        may_repeat: Whether the sampler may give the same batch several times: it is not of PyTorch.
        fingerprints: The fingerprints of the tensors.
        step: The training step that follows.
    """

    iterator: int
    number: int
    workers: int
    batches: int | None
    may_repeat: bool
    fingerprints: tuple[int, ...]
    step: int = -1


def sampled_fingerprint(tensor: Tensor) -> int:
    """Return a number for the shape, the dtype and up to `MAX_ELEMENTS` elements of a dense tensor on any device."""
    flat = tensor.detach().reshape(-1)
    bits = fingerprint(flat[:: len(flat) // MAX_ELEMENTS + 1].cpu())
    return hash((int(bits), tensor.shape))


def is_readable(tensor: Tensor) -> bool:
    """Return whether the values of a tensor can be read when the step ends."""
    is_plain = (
        type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_meta and not tensor.is_quantized
    )
    return is_plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def version_of(tensor: Tensor) -> int:
    """Return the number of operations that have changed a tensor in place; 0 for one of `torch.inference_mode`."""
    return 0 if tensor.is_inference() else tensor._version


def observe_batches(observer: Callable[[LoaderBatch], None]) -> None:
    """Call a function with each batch of a data loader of this process, until `unobserve_batches`."""
    _observers.append(observer)
    if not _replaced:
        original: Callable[[Any], Any] = _Iterator.__next__
        observed = _observed(original)
        _replaced.append((original, observed))
        setattr(_Iterator, "__next__", observed)  # noqa: B010 - for mypy, it is a method


def unobserve_batches(observer: Callable[[LoaderBatch], None]) -> None:
    """Stop calling a function. Do nothing if it is not called."""
    if observer in _observers:
        _observers.remove(observer)
    if (
        not _observers and _replaced and _Iterator.__next__ is _replaced[0][1]
    ):  # otherwise, other code has replaced it too
        setattr(_Iterator, "__next__", _replaced.pop()[0])  # noqa: B010


def _observed(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(original)
    def next_batch(iterator: Any) -> Any:
        batch = original(iterator)
        observers = [*_observers]
        try:
            observed = _describe(iterator, batch) if observers else None
        except Exception:  # the batch of any loader must reach the loop
            return batch
        if observed is not None and observed.fingerprints:
            for observer in observers:
                observer(observed)
        return batch

    return next_batch


def _describe(iterator: Any, batch: Any) -> LoaderBatch:
    is_iterable = iterator._dataset_kind == dataloader._DatasetKind.Iterable
    may_repeat = not (is_iterable or _is_known(iterator._index_sampler))
    batches = None if is_iterable or may_repeat else len(iterator._index_sampler)
    prints = tuple(sampled_fingerprint(tensor) for _, tensor in iter_tensors(batch) if is_readable(tensor))
    number, workers = iterator._num_yielded - 1, iterator._num_workers
    return LoaderBatch(id(iterator), number, workers, batches, may_repeat, prints)


def _is_known(sampler: Any) -> bool:
    """Return whether a sampler, and those that it reads, are known. The length of others may draw random numbers."""
    while sampler is not None:
        methods = type(sampler).__iter__, type(sampler).__len__
        if any(method.__module__.partition(".")[0] not in _KNOWN for method in methods):
            return False
        sampler = getattr(sampler, "sampler", getattr(sampler, "batch_sampler", None))
    return True
