"""A model that ends one process during training."""

from __future__ import annotations

import os
import signal

import torch
from torch import Tensor, nn


class FailingModel(nn.Sequential):
    """An MLP for digits.

    Args:
        rank: Rank of the process that ends.
        how: `kill` (SIGKILL) or `raise` (an error).
        after: Number of steps before the process ends.
        passes: Number of passes of shape inference before: 2 if the run has a batch that is smaller than the first one. Default: 1.
    """

    def __init__(self, rank: int, how: str, after: int, passes: int = 1) -> None:
        super().__init__(
            nn.Flatten(), nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 10)
        )
        # Private, so that they are no settings of the model: these differ between the runs.
        self._rank, self._how, self._left = rank, how, after + passes

    def forward(self, input: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self._left -= 1
            if self._left < 0 and os.environ.get("RANK") == str(self._rank):
                if self._how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise ValueError("this batch is bad")
        output: Tensor = super().forward(input)
        return output
