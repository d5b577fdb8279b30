"""The learning-rate schedules that conf/scheduler names and PyTorch does not have as they are needed."""

from __future__ import annotations

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR


def cosine(optimizer: Optimizer, steps: int, eta_min: float = 0.0) -> CosineAnnealingLR:
    """One half of a cosine from the learning rate down to `eta_min`, over all steps of the run."""
    return CosineAnnealingLR(optimizer, T_max=steps, eta_min=eta_min)
