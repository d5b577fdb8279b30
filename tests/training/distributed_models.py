"""Models and tasks for tests of distributed runs."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.nn.functional import all_to_all_single
from torch.distributed.tensor import Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel.style import ParallelStyle
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


class Experts(nn.Module):
    """Four experts on tokens sorted by expert: a linear layer each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 16, 16) / 4)  # [experts, features, features]

    def forward(self, tokens: Tensor, counts: Tensor) -> Tensor:
        """Map tokens [tokens, 16], of which `counts` [experts] belong to each expert, to [tokens, 16]."""
        weight = self.weight.to_local() if hasattr(self.weight, "to_local") else self.weight
        parts = zip(tokens.split(counts.tolist()), weight, strict=True)
        return torch.cat([part @ each for part, each in parts])


class MixtureOfExperts(nn.Module):
    """A model for digits that sends each sample to the expert with the largest logit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.router = nn.Linear(64, 16), nn.Linear(16, 4)
        self.experts, self.last = Experts(), nn.Linear(16, 12)

    def forward(self, images: Tensor) -> Tensor:
        x = self.first(images.flatten(1)).tanh()
        gate, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        done = self.experts(x[order], chosen.bincount(minlength=4))
        scores: Tensor = self.last(x + gate[:, None] * done[order.argsort()])
        return scores


class ExpertParallel(ParallelStyle):
    """Distributes the experts over the processes, and sends the tokens to their experts and back (all_to_all)."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        group, size = device_mesh.get_group(), device_mesh.size()
        state: list[Any] = []

        def shard(_: str, experts: nn.Module, mesh: DeviceMesh) -> None:
            experts.weight = nn.Parameter(distribute_tensor(experts.weight, mesh, [Shard(0)]))

        def exchange(tokens: Tensor, sent: Tensor, received: Tensor) -> Tensor:
            sizes = [counts.view(size, -1).sum(1).tolist() for counts in (received, sent)]
            return all_to_all_single(tokens.new_empty(sum(sizes[0]), tokens.shape[1]), tokens, *sizes, group=group)

        def dispatch(_: nn.Module, inputs: Any, __: DeviceMesh) -> Any:
            tokens, sent = inputs
            received = torch.empty_like(sent)  # from each process, for each of the experts of this one
            torch.distributed.all_to_all_single(received, sent, group=group)
            expert = torch.arange(len(sent) // size).repeat(size).repeat_interleave(received)
            order = expert.argsort(stable=True)
            state[:] = sent, received, order
            return exchange(tokens, sent, received)[order], received.view(size, -1).sum(0)

        def combine(_: nn.Module, outputs: Any, __: DeviceMesh) -> Tensor:
            sent, received, order = state
            return exchange(outputs[order.argsort()], received, sent)

        return distribute_module(module, device_mesh, shard, dispatch, combine)
