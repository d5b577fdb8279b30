"""Pruning by magnitude over several runs, which finds lottery tickets.

A round is a run in the folder `<folder>/<round>` that saves its final weights (`train.save=true`), such as a job of a sweep.
Round 0 trains the dense network. Each later round starts from the same initial weights, and keeps the weights that have the largest
magnitude at the end of the previous round. `prune` sets the other weights to zero before step 0, and `Pruned` after each step.

Source: Frankle & Carbin 2019, "The lottery ticket hypothesis: finding sparse, trainable neural networks".
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ..actions.base import Context
from ..storage.run_record import WEIGHTS


def prune(module: nn.Module, name: str, folder: str, round: int, keep: float) -> None:
    """Set the pruned weights of a module to zero, as a function of `apply` with `action: call`."""
    weight = module.get_parameter("weight")
    with torch.no_grad():
        weight.mul_(Pruned(folder, round, keep).mask(f"{name}.weight", weight))


class Pruned:
    """Set the pruned elements of a parameter to zero, as a function of `modify` with `kind: step_post`.

    Args:
        folder: The folder with the runs of the rounds.
        round: The index of the round, from 0.
        keep: The fraction of the remaining weights that each round keeps, from 0 to 1. A round has keep**round of all weights.

    Raises:
        ValueError: `round` is negative, or `keep` is not from 0 to 1.
    """

    def __init__(self, folder: str, round: int, keep: float) -> None:
        if round < 0:
            raise ValueError(f"round must be at least 0, got {round}")
        if not 0 <= keep <= 1:
            raise ValueError(f"keep must be from 0 to 1, got {keep}")
        self.previous = Path(folder) / str(round - 1) / WEIGHTS if round else None
        self.kept = keep**round
        self.masks: dict[str, Tensor] = {}

    def __call__(self, parameter: Tensor, context: Context) -> Tensor:
        """Return the parameter with its pruned elements set to zero; same shape and dtype."""
        return parameter * self.mask(f"{context.layer}.{context.path}", parameter)

    def mask(self, name: str, parameter: Tensor) -> Tensor:
        """Return which elements of a parameter are kept: a bool tensor with the shape and device of the parameter.

        Args:
            name: The name of the parameter in the state dict.

        Raises:
            FileNotFoundError: The previous round saved no weights.
        """
        if name not in self.masks:
            kept = torch.ones_like(parameter, dtype=torch.bool).flatten()
            if self.previous is not None:
                weights = torch.load(self.previous, weights_only=True, map_location=parameter.device)
                smallest = weights[name].abs().flatten().argsort()[: len(kept) - round(self.kept * len(kept))]
                kept[smallest] = False
            self.masks[name] = kept.view_as(parameter)
        return self.masks[name]
