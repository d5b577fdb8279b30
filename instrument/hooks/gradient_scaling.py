"""Gradients without the factor of a gradient scaler, and with it again."""

from __future__ import annotations

import torch
from torch import Tensor

from ..actions.intervention import straight_through
from ..values.sparse import is_sparse


def unscaled(gradient: Tensor, scale: Tensor) -> Tensor:
    """Divide a gradient by the factor of a gradient scaler, in float32 or the wider dtype of the gradient."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return gradient.to(wide) / scale.to(gradient.device)


def rescaled(new: Tensor, given: Tensor, gradient: Tensor, scale: Tensor) -> Tensor:
    """Multiply the result of an action, which got the gradient without the factor of a gradient scaler (`given`), by this factor.

    Elements that the action does not change stay bit-identical for any factor.
    """
    if new is given:
        return gradient
    scaled = (new * scale.to(gradient.device)).to(gradient.dtype)
    if is_sparse(gradient):
        return scaled
    is_unchanged = (new == given) | (new.isnan() & given.isnan())
    return straight_through(scaled, torch.where(is_unchanged, gradient, scaled))
