"""The forward pass and the loss of a batch, as one module."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from . import Outcome, Task, call_task
from .model_output import OutputUnit, captured_outputs, last_output


class Forward(nn.Module):
    """A module that runs a task on a model and applies the loss hooks.

    The wrappers that reduce gradients over processes need one module that computes the complete loss. It includes
    submodules that the task calls directly, and penalties that hooks add to the loss.

    Args:
        model: The model that the task gets.
        task: Computes the loss of a batch. It is not registered as a submodule.
        precision: Returns the autocast context of the task.
        unit: The part of the output of the model's last call that replaces the loss in the backward pass. Default: None,
            the loss.
    """

    task: Task

    def __init__(
        self,
        model: nn.Module,
        task: Task,
        precision: Callable[[], AbstractContextManager[Any]],
        unit: OutputUnit | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        object.__setattr__(self, "task", task)  # Not registered, because the parameters of a task are not trained.
        self.precision = precision
        self.unit = unit

    def forward(self, batch: Any, loss_hook: Callable[[Tensor], Tensor]) -> tuple[Outcome, Tensor | None]:
        """Compute the outcome of a batch and the loss for the backward pass.

        Args:
            batch: The batch, on the device of the model.
            loss_hook: Called with the loss, or the sum of the output unit; returns the scalar that replaces it.

        Returns:
            The outcome of the task, and the scalar that `loss_hook` returned; None if the outcome has no loss.

        Raises:
            ConfigError: The output has no such unit.
        """
        if self.unit is None:
            with self.precision():
                outcome = call_task(self.task, self.model, batch)
            return outcome, None if outcome.loss is None else loss_hook(outcome.loss)
        with captured_outputs(self.model) as outputs, self.precision():
            outcome = call_task(self.task, self.model, batch)
        return outcome, loss_hook(self.unit.sum_in(last_output(outputs)))
