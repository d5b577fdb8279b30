"""Whether a loss depends on all parameters that train: DistributedDataParallel waits for the gradient of each."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def has_idle(model: nn.Module, loss: Tensor) -> bool:
    """Whether no gradient comes to a parameter that trains.

    Hooks need not be there: what an intervention puts in a tensor's place is in the graph, or refused.

    Args:
        model: What is trained.
        loss: Of a batch; its graph is spent.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    except (
        RuntimeError
    ):  # a reentrant checkpoint, which knows nothing but backward; an error is met again in the first step
        return False
    return any(gradient is None for gradient in gradients)
