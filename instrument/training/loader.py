"""Loading of batches, in this process or in worker processes that load ahead.

Each batch is loaded with random states that depend only on the seed of the run, the pass over the dataset, the index of
the batch and the rank. A dataset or a `collate_fn` that draws random numbers therefore gives the same batches with any
number of workers and after a resume, and the random states of the training do not change.
"""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from .distributed.batch_sharding import FULL_BATCH, BatchShard


class LoadedBatch(NamedTuple):
    """A batch from the loader.

    Attributes:
        batch: The collated samples of this process.
        indices: Their indices in the complete dataset, or in the stream.
        total: The number of samples of all processes.
    """

    batch: Any
    indices: list[int]
    total: int

    @property
    def samples(self) -> int:
        """The number of samples of this process."""
        return len(self.indices)


class Slice(Subset[Any]):
    """A slice of a dataset, or of another slice of it."""

    def index_in_dataset(self, index: int) -> int:
        """Return the index of a sample in the complete dataset, given its index in the slice."""
        index = self.indices[index]
        return self.dataset.index_in_dataset(index) if isinstance(self.dataset, Slice) else index


class Stream(IterableDataset[Any]):
    """A slice of an iterable dataset, whose length is unknown.

    Args:
        dataset: The dataset. Each `iter(dataset)` starts from the beginning.
        stop: The index after the last sample; None for all samples.
    """

    def __init__(self, dataset: Iterable[Any], start: int, stop: int | None) -> None:
        self.dataset = dataset
        self.start = start
        self.stop = stop

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.dataset), self.start, self.stop)


def lists(items: Sequence[Sequence[Any]]) -> tuple[list[Any], ...]:
    """Collate samples whose tensors differ in shape, such as images with boxes: return a list per field.

    Args:
        items: The samples of a batch, tuples of the same length.

    Returns:
        For each field of the samples, the list of its values.
    """
    return tuple(list(field) for field in zip(*items, strict=True))


def unchanged(items: list[Any]) -> list[Any]:
    """Return the list of samples as the batch, such as a list of texts."""
    return items


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are loaded.

    Attributes:
        collate_fn: Joins a list of samples into a batch. Default: PyTorch's `default_collate`.
        num_workers: The number of worker processes. Default: 0, this process.
        pin_memory: Whether batches are copied to pinned memory. Default: False.
        seed: The seed of the run. Default: 0.
    """

    collate_fn: Callable[[list[Any]], Any] = default_collate
    num_workers: int = 0
    pin_memory: bool = False
    seed: int = 0


DEFAULT_OPTIONS = LoaderOptions()
# Workers start in each epoch and each evaluation. A forked process does not import PyTorch again.
START_METHOD = "fork" if sys.platform == "linux" else None
_NUMPY = np.random.MT19937(0)  # NumPy's global generator while a batch is loaded.


class Loader:
    """The batches of a dataset. Iteration gives them in the order of the dataset, as for an evaluation.

    Worker processes end with the iterator: after the last batch, after an error, and if the iterator is closed.

    Args:
        dataset: A dataset with a length and items, or a `Stream`.
        batch_size: The number of samples per batch, over all processes. The last batch may be smaller. An incomplete
            batch of a stream is left out if it has fewer samples than there are processes.
        shard: The part of each batch that this process gets. Default: the full batch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        shard: BatchShard = FULL_BATCH,
        options: LoaderOptions = DEFAULT_OPTIONS,
    ) -> None:
        self.dataset = dataset
        self.batch_size = batch_size
        self.shard = shard
        self.options = options

    def __iter__(self) -> Iterator[LoadedBatch]:
        return self.load("eval")

    def __len__(self) -> int:
        return math.ceil(self.length / self.batch_size)

    @property
    def length(self) -> int:
        """The number of samples. That of a stream is unknown: one batch is assumed, or the slice up to its `stop`."""
        if not isinstance(self.dataset, Stream):
            return len(self.dataset)  # type: ignore[arg-type]
        return self.batch_size if self.dataset.stop is None else self.dataset.stop - self.dataset.start

    def load(self, name: str, order: Sequence[int] | None = None, skip: int = 0) -> Iterator[LoadedBatch]:
        """Load the batches of one pass over the dataset.

        Args:
            name: The name of the pass. It determines random numbers that the dataset draws.
            order: The indices of the samples. Default: None, all samples in the order of the dataset. A stream has
                no other order.
            skip: The number of batches to leave out at the beginning. Default: 0.
        """
        workers = self.options.num_workers
        is_stream = isinstance(self.dataset, Stream)
        loader = DataLoader(
            _StreamBatches(self, name, skip) if is_stream else _IndexedBatches(self),
            batch_size=None,
            sampler=None if is_stream else self._keys(name, order, skip),
            collate_fn=unchanged,
            num_workers=workers,
            pin_memory=self.options.pin_memory,
            multiprocessing_context=START_METHOD if workers else None,
            generator=torch.Generator(),  # By default, DataLoader draws a seed from the global generator.
        )
        batches = iter(loader)
        try:
            while True:
                with nullcontext() if workers else preserved_random_states():
                    loaded = next(batches, None)
                if loaded is None:
                    return
                yield loaded
        finally:
            if workers:  # A traceback may refer to the iterator, so its workers would not end with the run.
                batches._shutdown_workers()  # type: ignore[attr-defined]

    def _keys(self, name: str, order: Sequence[int] | None, skip: int) -> Iterator[_Key]:
        """Yield the seed and the indices of each batch."""
        if order is None:
            order = range(len(self.dataset))  # type: ignore[arg-type]
        for index in range(skip, -(-len(order) // self.batch_size)):
            start = index * self.batch_size
            batch = range(start, min(start + self.batch_size, len(order)))
            own = [order[i] for i in self.shard.indices_of(batch)]
            yield _Key(self.seed_of(name, index), own, len(batch))

    def seed_of(self, name: str, index: int) -> int:
        """Return the seed of the random states for one batch of this process."""
        key = repr((self.options.seed, name, index, self.shard.rank))
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little")


class _Key(NamedTuple):
    """What a worker needs to load a batch: seed, indices of the samples, number of samples of all processes."""

    seed: int
    indices: list[int]
    total: int


class _IndexedBatches(Dataset[LoadedBatch]):
    """The batches of a dataset with a length. Its keys are instances of `_Key`."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __getitem__(self, key: _Key) -> LoadedBatch:
        seed_random_states(key.seed)
        dataset: Any = self.loader.dataset
        indices = key.indices
        while isinstance(dataset, Slice):
            dataset, indices = dataset.dataset, [dataset.indices[index] for index in indices]
        read_items = getattr(dataset, "__getitems__", None)
        items: list[Any] = []
        try:
            for part in [indices] if read_items else [[index] for index in indices]:
                items.extend(read_items(part) if read_items else [dataset[part[0]]])  # += would add to an array
            part = indices
            return LoadedBatch(self.loader.options.collate_fn(items), indices, key.total)
        except StopIteration as error:  # DataLoader would end the pass without an error.
            raise RuntimeError(f"the dataset or collate_fn raised StopIteration for samples {part}") from error


class _StreamBatches(IterableDataset[LoadedBatch]):
    """The batches of a stream, without the first `skip` batches."""

    def __init__(self, loader: Loader, name: str, skip: int) -> None:
        self.loader = loader
        self.name = name
        self.skip = skip

    def __iter__(self) -> Iterator[LoadedBatch]:
        loader, shard = self.loader, self.loader.shard
        samples: Iterator[Any] | None = None
        for index in count():
            seed_random_states(loader.seed_of(self.name, index))
            samples = samples or iter(loader.dataset)
            batch = list(islice(samples, loader.batch_size))
            if len(batch) < shard.size:
                return
            if index >= self.skip:
                own = shard.indices_of(range(len(batch)))
                first = loader.dataset.start + index * loader.batch_size  # type: ignore[attr-defined]
                collated = loader.options.collate_fn([batch[i] for i in own])
                yield LoadedBatch(collated, [first + i for i in own], len(batch))


def seed_random_states(seed: int) -> None:
    """Seed Python, NumPy and the CPU generator of PyTorch with a number from 0 to 2^32 - 1."""
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)  # torch.manual_seed also seeds all devices.


@contextmanager
def preserved_random_states() -> Iterator[None]:
    """Restore the random states of Python, NumPy and the CPU generator of PyTorch after the block.

    Inside the block, the state of NumPy is undefined until it is seeded.
    """
    python, numpy, own = random.getstate(), np.random.mtrand.get_bit_generator(), torch.get_rng_state()
    np.random.mtrand.set_bit_generator(
        _NUMPY
    )  # The exchange takes a microsecond; get_state and set_state take seventy.
    try:
        yield
    finally:
        random.setstate(python)
        np.random.mtrand.set_bit_generator(numpy)
        torch.set_rng_state(own)
