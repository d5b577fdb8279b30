"""Whether a loss depends on all parameters that train: DistributedDataParallel waits for the gradient of each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..plan.trial import leaving_no_trace


def has_idle(model: nn.Module, loss: Callable[[], Tensor]) -> bool:
    """Whether no gradient comes to a parameter that trains.

    Hooks need not be there: what an intervention puts in a tensor's place is in the graph, or refused.

    Args:
        model: What is trained.
        loss: The loss of a batch; it is called once, and leaves no trace.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        with leaving_no_trace(model, training=True), torch.enable_grad():
            gradients = torch.autograd.grad(loss(), trained, allow_unused=True)
    except (
        RuntimeError
    ):  # a reentrant checkpoint, which knows nothing but backward; an error is met again in the first step
        return False
    return any(gradient is None for gradient in gradients)
