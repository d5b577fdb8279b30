"""A factor of all learning rates that can change during the training."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch.optim import Optimizer


@dataclass
class LearningRateScale:
    """Multiplies the learning rates only while the optimizer makes its step, so that a scheduler does not see the factor.

    Attributes:
        factor: The factor.
    """

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
