"""The gradient that passes through a change (Bengio, Léonard & Courville 2013)."""

from __future__ import annotations

import torch
from torch import Tensor


def straight_through(old: Tensor, new: Tensor) -> Tensor:
    """Return the new value with the gradient of the old one (Bengio, Léonard & Courville 2013)."""
    return _StraightThrough.apply(old, new)  # type: ignore[no-any-return]


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, old: Tensor, new: Tensor) -> Tensor:  # noqa: ARG004
        return new.detach().clone()

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        return gradients[0], None
