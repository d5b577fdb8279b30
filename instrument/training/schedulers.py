"""Learning rates: schedulers for `conf/scheduler`, and a factor that can change during the training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR


def cosine(optimizer: Optimizer, steps: int, eta_min: float = 0.0) -> CosineAnnealingLR:
    """Return a cosine annealing from the initial learning rate to `eta_min` over all steps of the run.

    Args:
        eta_min: The final learning rate. Default: 0.
    """
    return CosineAnnealingLR(optimizer, T_max=steps, eta_min=eta_min)


@dataclass
class LearningRateScale:
    """Multiplies the learning rates only while the optimizer makes its step, so that a scheduler does not see the factor."""

    factor: float = 1.0

    @contextmanager
    def applied(self, optimizer: Optimizer) -> Iterator[None]:
        """Multiply the learning rates of all parameter groups for the duration of a `with` block."""
        if self.factor == 1.0:
            yield
            return
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.factor
        try:
            yield
        finally:
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
