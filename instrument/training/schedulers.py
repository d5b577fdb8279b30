"""Learning-rate schedulers for `conf/scheduler` that PyTorch does not provide in the required form."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR


def cosine(optimizer: Optimizer, steps: int, eta_min: float = 0.0) -> CosineAnnealingLR:
    """Return a cosine annealing from the initial learning rate to `eta_min` over all steps of the run.

    Args:
        optimizer: The optimizer.
        steps: The number of steps of the run.
        eta_min: The final learning rate. Default: 0.
    """
    return CosineAnnealingLR(optimizer, T_max=steps, eta_min=eta_min)
