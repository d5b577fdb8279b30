"""Task for autoencoders: the input is the target."""

from __future__ import annotations

from typing import Any

from torch import nn

from .base import Outcome, inputs_of
from .loss_terms import HasLoss, Loss, number_of_terms
from .model_output import LossOutput


class Reconstruction(HasLoss):
    """A loss of the model output and the input.

    A batch is a tensor, or a tuple or list whose first element is a tensor. Further elements, such as targets, are
    ignored.

    The loss uses one tensor of the output. If a variational autoencoder returns (reconstruction, mean, log_var), it is
    trained without the KL term. The run reports which outputs get no gradient. For the KL term, write a custom task:
    see [Custom functions](../guides/custom.md#a-custom-task).

    Args:
        loss: Called as `loss(output, inputs)`. Returns the mean over the samples or elements, a scalar; or the sum, if
            its `reduction` is `sum`.
        output: The tensor of the model's output from which the loss is computed, if the model returns several; see
            `Supervised`. Default: None, the entry `logits` or `out`, or else the first tensor.

    Raises:
        ValueError: `output` is invalid.
    """

    def __init__(self, loss: Loss, output: str | None = None) -> None:
        self.loss = loss
        self.output = LossOutput(output)

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
            ConfigError: The output has no tensor at the path `output`.
        """
        inputs = inputs_of(batch)
        output = self.output.of(model, model(inputs))
        if output.shape != inputs.shape:
            raise ValueError(f"the output has shape {list(output.shape)}, but the input has shape {list(inputs.shape)}")
        return Outcome(self.loss(output, inputs), len(inputs))

    def number_of_terms(self, batch: Any) -> float:
        """Return the number of elements of the inputs; with the reduction `batchmean`, the number of samples.

        Args:
            batch: Inputs [N, ...], or a tuple or list (inputs, ...).
        """
        return number_of_terms(self.loss, inputs_of(batch))
