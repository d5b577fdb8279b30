"""Batch sharding: batches in dataset order, split among the processes of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ..errors import ConfigError, Problem


@dataclass(frozen=True)
class BatchShard:
    """The shard of each batch that one process receives. The shard sizes of a batch differ by at most one sample.

    Attributes:
        rank: Rank of the process, from 0. Default: 0.
        size: Number of processes. Default: 1.
    """

    rank: int = 0
    size: int = 1

    def indices_of(self, batch: range) -> range:
        """Return the contiguous part of a batch that belongs to this process.

        Args:
            batch: Dataset indices of the full batch.
        """
        return batch[self.rank * len(batch) // self.size : (self.rank + 1) * len(batch) // self.size]


FULL_BATCH = BatchShard()
"""The shard of a single process: the full batch."""


class _ShardedBatchSampler(Sampler[Sequence[int]]):
    """Batch sampler that yields the dataset indices of each batch in order, restricted to a batch shard.

    Args:
        length: Number of samples in the dataset.
        batch_size: Number of samples in a full batch, over all processes.
        shard: Batch shard of this process.
    """

    def __init__(self, length: int, batch_size: int, shard: BatchShard) -> None:
        self.length = length
        self.batch_size = batch_size
        self.shard = shard

    def __iter__(self) -> Iterator[range]:
        for start in range(0, self.length, self.batch_size):
            yield self.shard.indices_of(range(start, min(start + self.batch_size, self.length)))

    def __len__(self) -> int:
        return math.ceil(self.length / self.batch_size)


def sequential_loader(dataset: Dataset[Any], batch_size: int, shard: BatchShard = FULL_BATCH) -> DataLoader[Any]:
    """Build a loader that iterates over a dataset in order and leaves the global random state unchanged.

    Args:
        dataset: Dataset with a length.
        batch_size: Number of samples in a full batch, over all processes. The last batch may be smaller.
        shard: Batch shard of this process. Default: the full batch.
    """
    batches = _ShardedBatchSampler(len(dataset), batch_size, shard)  # type: ignore[arg-type]
    # Without an explicit generator, DataLoader draws a seed from the global one.
    return DataLoader(dataset, batch_sampler=batches, generator=torch.Generator())  # type: ignore[arg-type]


def check_batch_size(dataset: Dataset[Any], batch_size: int, shard: BatchShard, where: str) -> None:
    """Check that every process receives at least one sample of every batch.

    Args:
        dataset: Dataset with a length.
        batch_size: Number of samples in a full batch, over all processes.
        shard: Batch shard of this process.
        where: Configuration key to name in the error.

    Raises:
        ConfigError: A batch has fewer samples than there are processes.
    """
    length = len(dataset)  # type: ignore[arg-type]
    last = length % batch_size or batch_size
    if batch_size < shard.size:
        message = f"every batch requires at least one sample for each of the {shard.size} processes"
        raise ConfigError(Problem(where, message, given=batch_size, allowed=f"{shard.size} or more"))
    if last < shard.size:
        message = f"the last batch has {last} of the {length} samples, but there are {shard.size} processes"
        allowed = f"a batch size and a slice whose last batch has {shard.size} or more samples"
        raise ConfigError(Problem(where, message, given=batch_size, allowed=allowed))


class IndexedLoader:
    """A sequential loader that also returns the dataset indices of each batch.

    Args:
        loader: Loader created by `sequential_loader`.
        indices: Index in the complete dataset of each sample of the loader's dataset.
    """

    def __init__(self, loader: DataLoader[Any], indices: Sequence[int]) -> None:
        self.loader = loader
        self.indices = indices

    def __iter__(self) -> Iterator[tuple[list[int], Any]]:
        """Yield the dataset indices and the batch: those of this process."""
        for positions, batch in zip(self.loader.batch_sampler or (), self.loader, strict=True):
            yield [self.indices[position] for position in positions], batch

    def __len__(self) -> int:
        """Return the number of batches."""
        return len(self.loader)


class StepBatches(list[Any]):
    """The micro-batches of one step.

    Attributes:
        samples: Number of samples in all micro-batches, summed over all processes.
        indices: Dataset indices of the samples of each micro-batch: those of this process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.samples = 0
        self.indices: list[list[int]] = []
