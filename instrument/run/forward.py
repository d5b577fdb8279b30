"""What is done with each batch before its backward pass, as one module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from .tasks import Outcome, Task


class Forward(nn.Module):
    """A task on its model, and the loss as hooks change it.

    It is one module so that whoever brings gradients together sees all that a loss is made of: parts of the model that the
    task calls itself, and penalties on the loss.

    Args:
        model: What the task is given.
        task: What makes a loss of a batch.
        precision: Makes the context that the task runs in.
    """

    task: Task

    def __init__(self, model: nn.Module, task: Task, precision: Callable[[], AbstractContextManager[Any]]) -> None:
        super().__init__()
        self.model = model
        object.__setattr__(self, "task", task)  # one that is a module is no part of what trains
        self.precision = precision

    def forward(self, batch: Any, see: Callable[[Tensor], Tensor]) -> tuple[Outcome, Tensor]:
        """What came of a batch, and the loss to call backward on.

        Args:
            batch: As the data loader gives it.
            see: Shown the loss; gives the one that takes its place.
        """
        with self.precision():
            outcome: Outcome = self.task(self.model, batch)
        return outcome, see(outcome.loss)
