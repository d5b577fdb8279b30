"""Batch sharding: batches in dataset order, split among the processes of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...errors import ConfigError, Problem


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
        """Return the contiguous part of a batch that belongs to this process."""
        return batch[self.rank * len(batch) // self.size : (self.rank + 1) * len(batch) // self.size]


FULL_BATCH = BatchShard()
"""The shard of a single process: the full batch."""


def check_batch_size(length: int, batch_size: int, shard: BatchShard, where: str) -> None:
    """Check that every process receives at least one sample of every batch.

    Args:
        batch_size: Number of samples in a full batch, over all processes.

    Raises:
        ConfigError: A batch has fewer samples than there are processes.
    """
    last = length % batch_size or batch_size
    if batch_size < shard.size:
        message = f"every batch requires at least one sample for each of the {shard.size} processes"
        raise ConfigError(Problem(where, message, given=batch_size, allowed=f"{shard.size} or more"))
    if last < shard.size:
        message = f"the last batch has {last} of the {length} samples, but there are {shard.size} processes"
        allowed = f"a batch size and a slice whose last batch has {shard.size} or more samples"
        raise ConfigError(Problem(where, message, given=batch_size, allowed=allowed))


class StepBatches(list[Any]):
    """The micro-batches of one step.

    Attributes:
        sizes: Number of samples of this process in each micro-batch.
        samples: Number of samples in all micro-batches, summed over all processes.
        indices: Dataset indices of the samples of each micro-batch: those of this process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.samples = 0
        self.indices: list[list[int]] = []

    def add(self, batch: Any, indices: list[int], total: int) -> None:
        """Append a micro-batch.

        Args:
            indices: Dataset indices of its samples: those of this process.
        """
        self.append(batch)
        self.indices.append(indices)
        self.sizes.append(len(indices))
        self.samples += total
