"""Batches in order, and what each of several processes gets of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from ...errors import ConfigError, Mistake


@dataclass(frozen=True)
class Share:
    """What a process gets of each batch: as many samples of it as any other, or one fewer.

    Attributes:
        rank: Which of the processes, from 0.
        size: How many there are.
    """

    rank: int = 0
    size: int = 1

    def of(self, batch: range) -> range:
        """This process's part of a batch's places."""
        return batch[self.rank * len(batch) // self.size : (self.rank + 1) * len(batch) // self.size]


WHOLE = Share()
"""What a single process gets."""


class _Shares(Sampler[Sequence[int]]):
    """The places of each batch in order, or a share of them."""

    def __init__(self, length: int, batch_size: int, share: Share) -> None:
        self.length = length
        self.batch_size = batch_size
        self.share = share

    def __iter__(self) -> Iterator[range]:
        for start in range(0, self.length, self.batch_size):
            yield self.share.of(range(start, min(start + self.batch_size, self.length)))

    def __len__(self) -> int:
        return math.ceil(self.length / self.batch_size)


def in_order(dataset: Dataset[Any], batch_size: int, share: Share = WHOLE) -> DataLoader[Any]:
    """Batches in the order of the dataset, or a share of each; going through them does not move the global random state."""
    batches = _Shares(len(dataset), batch_size, share)  # type: ignore[arg-type]
    # Without a generator of its own it draws a seed from the global one.
    return DataLoader(dataset, batch_sampler=batches, generator=torch.Generator())  # type: ignore[arg-type]


def refuse_small_batches(dataset: Dataset[Any], batch_size: int, share: Share, where: str) -> None:
    """Every process needs a sample of every batch.

    Raises:
        ConfigError: The last batch, or each, has fewer samples than there are processes.
    """
    length = len(dataset)  # type: ignore[arg-type]
    last = length % batch_size or batch_size
    if batch_size < share.size:
        problem = f"each of the {share.size} processes needs a sample of every batch"
        raise ConfigError(Mistake(where, problem, written=batch_size, allowed=f"{share.size} or more"))
    if last < share.size:
        problem = f"{length} samples leave {last} for the last of the batches, and there are {share.size} processes"
        allowed = f"a size and a slice that leave it {share.size} or more"
        raise ConfigError(Mistake(where, problem, written=batch_size, allowed=allowed))


class Group(list[Any]):
    """The micro-batches of one step.

    Attributes:
        samples: In all of them, over all processes.
    """

    def __init__(self) -> None:
        super().__init__()
        self.samples = 0
