"""Datasets of dicts and a sampler, for distributed runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, WeightedRandomSampler


def rows(split: str) -> list[dict[str, Tensor]]:
    """Return 22 rows with a class. Each third class is ignored by the loss."""
    generator = torch.Generator().manual_seed(len(split))
    inputs, classes = torch.randn(22, 4, generator=generator), torch.randint(3, (22,), generator=generator)
    classes[::3] = -100
    return [{"rows": row, "labels": label} for row, label in zip(inputs, classes, strict=True)]


class Stream(IterableDataset[dict[str, Tensor]]):
    """The same rows, without a length."""

    def __init__(self, split: str) -> None:
        self.rows = rows(split)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.rows)


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
