"""Lightning modules, in a separate file because importing Lightning takes seconds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn


class Module(L.LightningModule):
    def __init__(self, fail_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        self.fail_at = fail_at
        self.losses: list[float] = []  # of each training batch

    def forward(self, inputs: Tensor) -> Tensor:
        return self.net(inputs)  # type: ignore[no-any-return]

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        if index == self.fail_at:
            raise ValueError("a bug of the user's")
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[Tensor], index: int) -> None:
        self.net(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Logging(Module):
    """Module that logs the loss of a validation, except in the second epoch."""

    def validation_step(self, batch: list[Tensor], index: int, dataloader_idx: int = 0) -> None:
        if self.current_epoch != 1:
            self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))


class Gan(Module):
    """Module with manual optimization: the critic steps in every batch, the generator in every other batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(3, 1)

    def training_step(self, batch: list[Tensor], index: int) -> None:  # type: ignore[override]
        generator, critic = self.optimizers()
        self.make_step(critic, lambda: self.critic(self.net(batch[0]).detach()).square().mean())
        if index % 2 == 0:
            self.make_step(generator, lambda: -self.critic(self.net(batch[0])).mean())

    def make_step(self, optimizer: Any, loss: Callable[[], Tensor]) -> None:
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(loss())
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:  # type: ignore[override]
        return [torch.optim.Adam(self.net.parameters(), lr=0.01), torch.optim.SGD(self.critic.parameters(), lr=0.1)]
