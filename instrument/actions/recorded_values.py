"""Recorded values that replace a tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..nested import to_device
from .tensor_selection import TensorSelection


def with_shape(values: Tensor, *shapes: Sequence[int]) -> Tensor:
    """Return values of samples with the first shape from which they differ only by dimensions of size 1 at the end."""
    count = values.dim()
    for shape in shapes:
        if tuple(shape[1:count]) == values.shape[1:] and all(size == 1 for size in shape[count:]):
            return values.reshape(len(values), *shape[1:])
    return values


def patch(tensor: Tensor, recorded: Tensor, selection: TensorSelection | None = None) -> Tensor:
    """Replace a tensor by a recorded one. No gradient flows through it.

    Args:
        tensor: The tensor: complete, or the selected part.
        recorded: The recorded values, in CPU memory, with the shape of the tensor or of the complete tensor.
        selection: The part of the complete tensor; None if the tensor is complete.

    Raises:
        ValueError: The recorded tensor has neither of these shapes.
    """
    new = to_device(recorded, tensor.device).to(tensor.dtype)
    if selection is not None and new.shape == selection.shape:
        new = selection.of(new)
    if new.shape != tensor.shape:
        raise ValueError(
            f"the recorded tensor has shape {list(recorded.shape)}, the tensor to replace {list(tensor.shape)}"
        )
    return torch.where(torch.ones((), dtype=torch.bool, device=tensor.device), new, tensor)
