"""Models that several processes have to be told about."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from instrument.tasks import Outcome


class Idle(nn.Module):
    """An MLP for digits, beside which a layer stands idle: always, or, from a number of steps on, another one.

    Args:
        after: Training passes after which the last layer but one is left out; 0: never.
        rank: The only process that leaves it out; all of them without it.
    """

    def __init__(self, after: int = 0, rank: int | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(64, 16)
        self.middle = nn.Linear(16, 16)
        self.last = nn.Linear(16, 10)
        self.idle = nn.Linear(16, 10) if not after else nn.Identity()
        self.after, self.seen = after, 0
        self.leaves_out = rank is None or os.environ.get("RANK") == str(rank)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images.flatten(1)).relu()
        self.seen += self.training and self.after > 0
        if not (self.after and self.leaves_out) or self.seen <= self.after:
            x = self.middle(x).relu()
        scores: Tensor = self.last(x)
        return scores


class Picky(nn.Linear):
    """A layer that cannot be made on rank 1."""

    def __init__(self) -> None:
        super().__init__(64, 10)
        if os.environ.get("RANK") == "1":
            raise TypeError("this card has too little memory")

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.flatten(1))


class Reentrant(nn.Module):
    """Activation checkpointing of the kind that knows nothing but backward()."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 16), nn.Linear(16, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.first(images.flatten(1)).relu()
        scores: Tensor = checkpoint(self.last, hidden, use_reentrant=True)
        return scores


class Distance(nn.Module):
    """A task with a network of its own, which nobody trains."""

    def __init__(self) -> None:
        super().__init__()
        self.seen_as = nn.Linear(10, 4)

    def forward(self, model: nn.Module, batch: list[Tensor]) -> Outcome:
        images, targets = batch
        wanted = self.seen_as(nn.functional.one_hot(targets, 10).float())
        return Outcome((self.seen_as(model(images)) - wanted).square().mean(), len(images))


def partly_ignored(split: str) -> list[tuple[Tensor, Tensor]]:
    """Tokens and targets, of which samples have 1, 0, 5 and 5 that count, over and over."""
    tokens, targets = torch.randint(7, (2, 48, 5), generator=torch.Generator().manual_seed(0))
    targets[::4, 1:] = targets[1::4] = -100
    return list(zip(tokens, targets, strict=True))
