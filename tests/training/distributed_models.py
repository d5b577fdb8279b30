"""Models and tasks for tests of distributed runs."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from instrument.tasks import Outcome


class UnusedLayer(nn.Module):
    """An MLP for digits with a layer that is unused, always or after a number of steps.

    Args:
        after: Number of training passes after which the layer `middle` is skipped; 0: the layer `idle` is never used.
        rank: The only rank that skips the layer. Default: all ranks.
    """

    def __init__(self, after: int = 0, rank: int | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.middle = nn.Linear(16, 16)
        self.last = nn.Linear(16, 10)
        self.idle = nn.Linear(16, 10) if not after else nn.Identity()
        self.after, self.passes = after, 0
        self.skips_layer = rank is None or os.environ.get("RANK") == str(rank)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images.flatten(1)).relu()
        self.passes += self.training and self.after > 0
        if not (self.after and self.skips_layer) or self.passes <= self.after:
            x = self.middle(x).relu()
        scores: Tensor = self.last(x)
        return scores


class FailsOnRank1(nn.Linear):
    """A layer that cannot be created on rank 1."""

    def __init__(self) -> None:
        super().__init__(64, 10)
        if os.environ.get("RANK") == "1":
            raise TypeError("this card has too little memory")

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(1))


class Reentrant(nn.Module):
    """Model with reentrant activation checkpointing, which only supports `backward()`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.flatten(1)).relu()
        scores: Tensor = checkpoint(self.last, hidden, use_reentrant=True)
        return scores


class EmbeddingDistance(nn.Module):
    """A task with its own network, which is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(10, 4)

    def forward(self, model: nn.Module, batch: list[Tensor]) -> Outcome:
        images, targets = batch
        expected = self.embedding(nn.functional.one_hot(targets, 10).float())
        return Outcome((self.embedding(model(images)) - expected).square().mean(), len(images))


def partly_ignored(split: str) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and targets; 1, 0, 5 and 5 targets of successive samples are not ignored, repeatedly."""
    tokens, targets = torch.randint(7, (2, 48, 5), generator=torch.Generator().manual_seed(0))
    targets[::4, 1:] = targets[1::4] = -100
    return list(zip(tokens, targets, strict=True))


class Numbered(nn.Module):
    """Model with a nested output and a hand-written hook. The first input of a sample is its index."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 16)
        self.head = NestedHead()
        self.ids = torch.empty(0)
        self.calls = 0
        self.head.register_forward_hook(self.keep)

    def forward(self, inputs: Tensor) -> Tensor:
        self.ids = inputs[:, 0].long()
        return self.head(self.body(inputs[:, 1:]))["scores"]

    def keep(self, module: nn.Module, args: Any, output: dict[str, Any]) -> None:
        """Save the output of a batch with the indices of its samples."""
        self.calls += 1
        kept = {"ids": self.ids, "scores": output["scores"].detach(), "states.0": output["states"][0].detach()}
        phase = "train" if module.training else "eval"
        torch.save(kept, f"{phase}-{os.environ['RANK']}-{self.calls:03}.pt")


class NestedHead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(16, 3)

    def forward(self, inputs: Tensor) -> dict[str, Any]:
        return {"scores": self.scores(inputs), "states": (inputs.relu(),)}


def numbered(split: str) -> TensorDataset:
    """Return 40 samples of 8 random numbers after the index of the sample."""
    ids = torch.arange(40)
    values = torch.randn(40, 8, generator=torch.Generator().manual_seed(len(split)))
    return TensorDataset(torch.cat([ids[:, None], values], dim=1), ids % 3)
