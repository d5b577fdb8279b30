"""Datasets of dicts and a sampler, for distributed runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, WeightedRandomSampler


class Rows(Dataset[dict[str, Tensor]]):
    """Rows with a class. Each third class is ignored by the loss."""

    def __init__(self, split: str, samples: int = 22) -> None:
        generator = torch.Generator().manual_seed(len(split))
        self.rows = torch.randn(samples, 4, generator=generator)
        self.classes = torch.randint(3, (samples,), generator=generator)
        self.classes[::3] = -100

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"rows": self.rows[index], "labels": self.classes[index]}


class Stream(IterableDataset[dict[str, Tensor]]):
    """The same rows, without a length."""

    def __init__(self, split: str) -> None:
        self.rows = Rows(split)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return (self.rows[index] for index in range(len(self.rows)))


def weighted(dataset: Any) -> WeightedRandomSampler:
    """Draw the last rows more often."""
    return WeightedRandomSampler([1.0 + i for i in range(len(dataset))], 20)


class Classifier(nn.Module):
    """A classifier whose output has logits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, rows: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": self.layers(rows)}
