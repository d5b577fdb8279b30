"""Batches of a run, their batch shards, and their loading in this process or in worker processes that load ahead.

Each batch is loaded with random states that depend only on the seed of the run, the pass over the dataset, the index of
the batch and the rank. A dataset or a `collate_fn` that draws random numbers therefore gives the same batches with any
number of workers and after a resume, and the random states of the training do not change.
"""

from __future__ import annotations

import hashlib
import math
import operator
import random
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, default_collate

from ..config.experiment import TrainConfig
from ..errors import ConfigError, InstrumentError, Problem, first_line, user_code_location


@dataclass(frozen=True)
class BatchShard:
    """The shard of each batch that one process receives. The shard sizes of a batch differ by at most one sample."""

    rank: int = 0
    size: int = 1

    def indices_of(self, batch: range) -> range:
        return batch[self.rank * len(batch) // self.size : (self.rank + 1) * len(batch) // self.size]


FULL_BATCH = BatchShard()
"""The shard of a single process: the full batch."""


def check_batch_size(length: int, batch_size: int, shard: BatchShard, where: str) -> None:
    """Raise a ConfigError unless every process receives at least one sample of every batch."""
    last = length % batch_size or batch_size
    if batch_size < shard.size:
        message = f"every batch requires at least one sample for each of the {shard.size} processes"
        raise ConfigError(Problem(where, message, given=batch_size, allowed=f"{shard.size} or more"))
    if last < shard.size:
        message = f"the last batch has {last} of the {length} samples, but there are {shard.size} processes"
        allowed = f"a batch size and a slice whose last batch has {shard.size} or more samples"
        raise ConfigError(Problem(where, message, given=batch_size, allowed=allowed))


class LoadedBatch(NamedTuple):
    """A batch from the loader. `indices`: in the complete dataset, or in the stream. `total`: the samples of all processes."""

    batch: Any
    indices: list[int]
    total: int

    @property
    def samples(self) -> int:
        return len(self.indices)


class Slice(Subset[Any]):
    """A slice of a dataset, or of another slice of it."""

    def index_in_dataset(self, index: int) -> int:
        """Return the index of a sample in the complete dataset, given its index in the slice."""
        index = self.indices[index]
        return self.dataset.index_in_dataset(index) if isinstance(self.dataset, Slice) else index


class Stream(IterableDataset[Any]):
    """A slice of an iterable dataset, whose length is unknown. Each `iter(dataset)` has to start from the beginning."""

    def __init__(self, dataset: Iterable[Any], start: int, stop: int | None) -> None:
        self.dataset = dataset
        self.start = start
        self.stop = stop

    def __iter__(self) -> Iterator[Any]:
        return islice(iter(self.dataset), self.start, self.stop)


def lists(items: Sequence[Sequence[Any]]) -> tuple[list[Any], ...]:
    """Collate samples whose tensors differ in shape, such as images with boxes: return for each field the list of its values."""
    return tuple(list(field) for field in zip(*items, strict=True))


def unchanged(items: list[Any]) -> list[Any]:
    """Return the list of samples as the batch, such as a list of texts."""
    return items


@dataclass(frozen=True)
class LoaderOptions:
    """How batches are loaded. `collate_fn` joins a list of samples into a batch; `shard` is the part that this process receives."""

    collate_fn: Callable[[list[Any]], Any] = default_collate
    num_workers: int = 0
    pin_memory: bool = False
    seed: int = 0
    shard: BatchShard = FULL_BATCH


DEFAULT_OPTIONS = LoaderOptions()
# Workers start in each epoch and each evaluation. A forked process does not import PyTorch again.
START_METHOD = "fork" if sys.platform == "linux" else None
_NUMPY = np.random.MT19937(0)  # NumPy's global generator while a batch is loaded.


@dataclass(frozen=True, eq=False)
class Loader:
    """The batches of a dataset. Iteration gives them in the order of the dataset, as for an evaluation.

    Worker processes end with the iterator: after the last batch, after an error, and if the iterator is closed.
    """

    dataset: Dataset[Any]  # a dataset with a length and items, or a `Stream`
    # The number of samples per batch, over all processes. The last batch may be smaller. An incomplete batch of a stream is left out if it
    # has fewer samples than there are processes.
    batch_size: int
    options: LoaderOptions = DEFAULT_OPTIONS

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
        """Load the batches of one pass over the dataset, without the first ones.

        Args:
            name: The name of the pass. It determines random numbers that the dataset draws.
            order: The indices of the samples. Default: None, the order of the dataset, the only one of a stream.
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
        if order is None:
            order = range(len(self.dataset))  # type: ignore[arg-type]
        for index in range(skip, -(-len(order) // self.batch_size)):
            start = index * self.batch_size
            batch = range(start, min(start + self.batch_size, len(order)))
            own = [order[i] for i in self.options.shard.indices_of(batch)]
            yield _Key(self.seed_of(name, index), own, len(batch))

    def seed_of(self, name: str, index: int) -> int:
        key = repr((self.options.seed, name, index, self.options.shard.rank))
        return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=4).digest(), "little")


class _Key(NamedTuple):
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
    def __init__(self, loader: Loader, name: str, skip: int) -> None:
        self.loader = loader
        self.name = name
        self.skip = skip

    def __iter__(self) -> Iterator[LoadedBatch]:
        loader, shard = self.loader, self.loader.options.shard
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


class Batches:
    """An iterator over the steps of a run.

    In each epoch of a training, the samples are shuffled again, or the sampler gives a new order. A stream starts from the
    beginning.

    Args:
        sampler: Gives the indices of the samples in each epoch, over all processes. Its random numbers depend only on
            the seed and the epoch. Default: None, all samples in random order.
        passes: The number of passes over the samples in order, instead of steps or epochs over shuffled samples. Default:
            None, a training.

    Raises:
        ConfigError: The length of the run does not follow from that of a stream, or the sampler gives invalid indices.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        config: TrainConfig,
        options: LoaderOptions = DEFAULT_OPTIONS,
        *,
        sampler: Iterable[int] | None = None,
        passes: int | None = None,
    ) -> None:
        self.dataset = dataset
        self.sampler = sampler
        self.passes = passes
        self.batch_size = config.batch_size
        self.accumulate = config.accumulate
        self._loader = Loader(dataset, config.batch_size, options)
        self._generator = torch.Generator().manual_seed(options.seed)
        self._before_epoch = self._generator.get_state()
        self._done = self._epoch = self._taken = 0  # Steps, epochs, and micro-batches of this epoch.
        self.length = self._length_of_epoch(config)
        self.micro_batches_per_epoch = -(-self.length // config.batch_size)
        per_epoch = -(-self.micro_batches_per_epoch // config.accumulate)
        epochs = config.epochs if passes is None else passes
        self.steps = config.steps if config.steps is not None and passes is None else per_epoch * (epochs or 1)
        self.stop = self.steps  # a replay ends earlier
        if sampler is not None:
            self._order_of_epoch()
            self._generator.set_state(self._before_epoch)

    def _length_of_epoch(self, config: TrainConfig) -> int:
        """Return the number of samples per epoch; of a stream, those of all steps, or in `mode: forward` those of the slice."""
        if not isinstance(self.dataset, Stream):
            return len(self.dataset if self.sampler is None else self.sampler)  # type: ignore[arg-type]
        message = "the dataset is iterable and has no length, so the number of steps per epoch is unknown"
        if self.passes is not None:
            if self.dataset.stop is None:
                raise ConfigError(Problem("data.slice.stop", message, given=None, fix="set data.slice.stop=N"))
            return self.dataset.stop - self.dataset.start
        if config.steps is None:
            fix = "set train.steps=N and train.epochs=null"
            raise ConfigError(Problem("train.epochs", message, given=config.epochs, fix=fix))
        return config.steps * config.accumulate * config.batch_size

    def __iter__(self) -> Iterator[tuple[int, list[LoadedBatch]]]:
        """Yield the epoch and the micro-batches of each remaining step.

        The last step of an epoch may have fewer micro-batches.
        """
        while self._done < self.stop and (self.passes is None or self._epoch < self.passes):
            self._before_epoch = self._generator.get_state()
            batches = self._loader.load(f"epoch {self._epoch}", self._order_of_epoch(), self._taken)
            while group := list(islice(batches, self.accumulate)):
                self._taken += len(group)
                self._done += 1
                yield self._epoch, group
                if self._done == self.stop:
                    return
            if not self._taken:
                raise InstrumentError(f"the dataset has no samples for step {self._done}, in epoch {self._epoch}")
            self._epoch, self._taken = self._epoch + 1, 0

    def _order_of_epoch(self) -> list[int] | None:
        """Return the indices of the samples in this epoch; None for a stream."""
        if isinstance(self.dataset, Stream):
            return None
        size = len(self.dataset)  # type: ignore[arg-type]
        if self.sampler is None:
            is_shuffled = self.passes is None
            return torch.randperm(size, generator=self._generator).tolist() if is_shuffled else list(range(size))
        seed = int(torch.randint(2**32, (), generator=self._generator))
        with preserved_random_states():
            seed_random_states(seed)
            if hasattr(self.sampler, "set_epoch"):
                self.sampler.set_epoch(self._epoch)
            order = list(self.sampler)
        invalid = [i for i in order if not (hasattr(i, "__index__") and 0 <= i < size)]
        if invalid or len(order) != self.length:
            given = f"index {invalid[0]!r}" if invalid else f"{len(order)} indices"
            allowed = f"{self.length} integers from 0 to {size - 1}, according to the lengths of sampler and slice"
            message = f"the sampler returned invalid indices in epoch {self._epoch}"
            raise ConfigError(Problem("data.sampler", message, given, allowed))
        return [*map(operator.index, order)]

    def sizes(self, step: int) -> list[int]:
        """Return the number of samples in each micro-batch of a step, summed over all processes."""
        first = step % -(-self.micro_batches_per_epoch // self.accumulate) * self.accumulate
        return batch_sizes(self.length, self.batch_size, first, first + self.accumulate)

    def samples_at(self, steps: Collection[int]) -> set[int] | None:
        """Return the dataset indices of the samples of some steps, over all processes; None for a stream."""
        dataset = self.dataset
        if not isinstance(dataset, Slice):
            return None
        per_epoch = -(-self.micro_batches_per_epoch // self.accumulate)
        size = self.batch_size * self.accumulate
        epoch, state = self._epoch, self._generator.get_state()
        indices: set[int] = set()
        for self._epoch in range(max(steps, default=-1) // per_epoch + 1):
            order = self._order_of_epoch() or []
            first = self._epoch * per_epoch
            for step in steps if len(indices) < len(dataset) else ():
                if first <= step < first + per_epoch:
                    indices.update(order[(step - first) * size : (step - first + 1) * size])
        self._epoch = epoch
        self._generator.set_state(state)
        return {dataset.index_in_dataset(index) for index in indices}

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data. It is valid between two steps."""
        return {"done": self._done, "epoch": self._epoch, "taken": self._taken, "generator": self._before_epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._done, self._epoch, self._taken = state["done"], state["epoch"], state["taken"]
        self._generator.set_state(state["generator"])


def batch_sizes(length: int, batch_size: int, first: int = 0, stop: int | None = None) -> list[int]:
    """Return the number of samples in each batch of a dataset from `first` to `stop`, summed over all processes."""
    return [min(batch_size, length - start) for start in range(0, length, batch_size)[first:stop]]


def first_batch(
    dataset: Dataset[Any], batch_size: int, options: LoaderOptions = DEFAULT_OPTIONS, where: str = "data.slice"
) -> LoadedBatch:
    """Load a batch of the first samples of the dataset, for shape inference. No worker process is started."""
    loader = Loader(dataset, batch_size, replace(options, num_workers=0))
    try:
        loaded = next(loader.load("first batch"), None)
    except Exception as error:
        reason = f"{type(error).__name__}: {first_line(error)}"
        default = options.collate_fn is DEFAULT_OPTIONS.collate_fn
        location = user_code_location(error) or user_code_location(error.__cause__ or error)
        message, allowed, fix = f"its items cannot be collated into a batch{location}", "", ""
        if default and location:  # PyTorch's own function collates, so the error is one of the dataset
            message = f"its samples cannot be loaded{location}"
        elif default:
            allowed = "tuples, dicts and lists of tensors of equal shape, arrays and numbers"
            fix = "set data.collate_fn to a function that joins a list of items"
        key = "data.dataset" if default else "data.collate_fn"
        raise ConfigError(Problem(key, message, reason, allowed, fix=fix)) from error
    if loaded is None:
        processes = options.shard.size
        message = f"the slice of the iterable dataset has fewer samples than there are processes ({processes})"
        raise ConfigError(Problem(where, message if processes > 1 else "the slice is empty"))
    return loaded


def samples_of(dataset: Dataset[Any] | None) -> set[int] | None:
    """Return the dataset indices of all samples of a slice; None for a stream."""
    return {*map(dataset.index_in_dataset, range(len(dataset)))} if isinstance(dataset, Slice) else None


@dataclass(frozen=True)
class PhaseBatches:
    """The batches of a phase: those of the steps or of an evaluation, or the probe batch."""

    first: LoadedBatch
    # Called with a number of samples, over all processes; returns a batch with the first samples.
    load: Callable[[int], LoadedBatch]
    # Called with a step; returns the number of samples in each of its batches, over all processes.
    sizes: Callable[[int], Sequence[int]]
    # Called with steps; returns the dataset indices of their samples, over all processes. None if they are unknown.
    ids: Callable[[Collection[int]], set[int] | None]
    split: str | None


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
    # The exchange takes a microsecond; get_state and set_state take seventy.
    np.random.mtrand.set_bit_generator(_NUMPY)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.mtrand.set_bit_generator(numpy)
        torch.set_rng_state(own)
