"""Autoencoder: the input is the target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .base import Outcome, inputs_of
from .supervised import main_output


class Autoencoder:
    """Inputs, perhaps with targets beside them, which are not looked at; a loss of the output and the input.

    Args:
        loss: Called as `loss(output, inputs)`; gives the mean over the samples.
    """

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.loss = loss

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        """The loss of a batch: inputs of any shape, which the model's output has to have too."""
        inputs = inputs_of(batch)
        output = main_output(model(inputs))
        if output.shape != inputs.shape:
            raise ValueError(
                f"the output is {list(output.shape)}, the input that it is held against {list(inputs.shape)}"
            )
        return Outcome(self.loss(output, inputs), len(inputs))
