"""Task for autoencoders: the input is the target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .base import Outcome, inputs_of
from .supervised import main_output


class Reconstruction:
    """A loss of the model output and the input.

    A batch is a tensor, or a tuple or list whose first element is a tensor. Further elements, such as targets, are
    ignored.

    Args:
        loss: Called as `loss(output, inputs)`. Returns the mean over the samples, a scalar.
    """

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.loss = loss

    def __call__(self, model: nn.Module, batch: Any) -> Outcome:
        """Compute the loss of a batch.

        Args:
            model: The model. Its output must have the shape of the input.
            batch: Inputs [N, ...], or a tuple or list (inputs, ...).

        Returns:
            The loss and the number of samples, without `correct`.

        Raises:
            ValueError: The shapes of output and input differ.
            TypeError: The inputs or the output are not a tensor.
        """
        inputs = inputs_of(batch)
        output = main_output(model(inputs))
        if output.shape != inputs.shape:
            raise ValueError(f"the output has shape {list(output.shape)}, but the input has shape {list(inputs.shape)}")
        return Outcome(self.loss(output, inputs), len(inputs))
