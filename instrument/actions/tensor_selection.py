"""A part of a tensor that can be read and replaced: indices along its dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..stats.portable import constants
from ..values.nested import to_device


class TensorSelection:
    """The selected part of tensors of one shape. All dimensions are kept, except those with an integer in a slice.

    Args:
        index: Slices and integers along the first dimensions.
        lists: The indices along further dimensions, applied after `index`.
    """

    def __init__(
        self, shape: Sequence[int], index: tuple[slice | int, ...], lists: Sequence[tuple[int, tuple[int, ...]]] = ()
    ) -> None:
        self.shape = tuple(shape)
        self.index = index
        self.lists = tuple(lists)

    @classmethod
    def of_indices(cls, shape: Sequence[int], indices: dict[int, tuple[int, ...]]) -> TensorSelection:
        """Create the selection of indices along dimensions. Those with a constant distance become slices."""
        ranges = {dim: _as_slice(given) for dim, given in indices.items()}
        index = tuple(ranges.get(dim) or slice(None) for dim in range(len(shape)))
        return cls(shape, index, [(dim, given) for dim, given in indices.items() if ranges[dim] is None])

    def of(self, tensor: Tensor) -> Tensor:
        """Return the selected part of a tensor of this shape: a view, or a copy if a list of indices has gaps."""
        part = tensor[self.index]
        for dim, indices in self.lists:
            part = part.index_select(dim, constants(indices, torch.int64, tensor.device))
        return part

    def into(self, tensor: Tensor, new: Tensor) -> Tensor:
        """Return a copy of a tensor with another selected part of its dtype. Gradients flow to the new part and to the rest."""
        parts = [tensor[self.index]]
        for dim, indices in self.lists[:-1]:
            parts.append(parts[-1].index_select(dim, constants(indices, torch.int64, tensor.device)))
        for (dim, indices), part in zip(reversed(self.lists), reversed(parts), strict=False):
            new = part.index_copy(dim, constants(indices, torch.int64, tensor.device), new)
        result = tensor.clone()
        result[self.index] = new
        return result


def _as_slice(indices: tuple[int, ...]) -> slice | None:
    """Return the slice of increasing indices with a constant distance; None for others."""
    first, step = indices[0], indices[1] - indices[0] if len(indices) > 1 else 1
    steps = range(first, first + step * len(indices), step) if step > 0 else None
    return slice(first, steps.stop, step) if steps is not None and tuple(steps) == indices else None


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
        message = f"the recorded tensor has shape {list(recorded.shape)}, the tensor to replace {list(tensor.shape)}"
        raise ValueError(message)
    return torch.where(torch.ones((), dtype=torch.bool, device=tensor.device), new, tensor)
