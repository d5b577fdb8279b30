"""Detection of unused parameters.

`DistributedDataParallel` waits for the gradient of every trainable parameter. It has to know in advance whether the
loss depends on all of them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def has_unused_parameters(model: nn.Module, loss: Tensor) -> bool:
    """Return whether a trainable parameter receives no gradient from a loss.

    The hooks of the run need not be attached: an intervention keeps the replaced tensor in the graph, or it is refused.

    Args:
        model: The model that is trained.
        loss: Scalar loss of one batch. Its autograd graph is freed.

    Returns:
        True if at least one parameter with `requires_grad` has no gradient. False if the gradients cannot be computed;
        the first training step reports that error.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    except RuntimeError:
        # Reentrant checkpointing supports only `backward`. Any other error is raised again in the first training step.
        return False
    return any(gradient is None for gradient in gradients)
