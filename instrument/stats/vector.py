"""Any tensor as one vector of real numbers."""

from __future__ import annotations

import torch
from torch import Tensor


def as_vector(tensor: Tensor) -> Tensor:
    """The elements of a tensor of any kind as one real vector, in no particular order.

    Args:
        tensor: Any shape, layout, dtype and device. Complex values are taken by their magnitude, in float64.

    Returns:
        Shape [elements], contiguous, detached; a view where the layout lets us.
    """
    tensor = tensor.detach().resolve_neg()
    if tensor.is_nested:
        return torch.cat([as_vector(part) for part in tensor.unbind()])
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = tensor.to(torch.complex128).abs()  # a magnitude may be larger than its parts' type can hold
    if tensor.is_contiguous():
        return tensor.view(-1)
    if tensor.dim() > 1:  # channels_last, transposed: statistics do not ask for an order, memory's own is the fastest
        by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        tensor = tensor.permute(by_stride)
    return tensor.reshape(-1).contiguous()
