"""Any tensor as one vector of real numbers, and which tensors have none."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.parameter import Parameter, is_lazy

from ..sharded import own_part


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


def unreadable(tensor: Tensor) -> str | None:
    """Why the elements of a tensor cannot be read, in words for coverage; None where they can.

    Args:
        tensor: Any tensor. Of one that several processes have shards of, this process's shard is meant.
    """
    part = own_part(tensor)
    if is_lazy(part):
        return "the tensor has no values yet: it is a parameter or a buffer of a lazy module, which no forward pass has run"
    if part.is_meta:
        return "the tensor is on the meta device, where tensors have shapes and no values"
    if part.is_quantized:
        return (
            f"the tensor is quantized (torch.{_name(part.dtype)}): hook the layer before quantize, or behind dequantize"
        )
    if not _is_numeric(part.dtype):
        return f"PyTorch cannot convert elements of type torch.{_name(part.dtype)} to numbers"
    if type(part) not in (Tensor, Parameter) and not _has_memory(part):
        return f"the tensor is a {type(part).__name__}, whose values are not in memory as a plain tensor's are"
    return None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _is_numeric(dtype: torch.dtype) -> bool:
    """Whether PyTorch converts elements of a type to float64, or to complex128."""
    try:
        torch.empty(1, dtype=dtype, device="cpu").to(torch.complex128 if dtype.is_complex else torch.float64)
    except RuntimeError:  # NotImplementedError among them
        return False
    return True


def _has_memory(tensor: Tensor) -> bool:
    """Whether a tensor of a class derived from Tensor becomes a vector at an address; a fake tensor does not."""
    try:
        vector = as_vector(tensor)
        return not vector.numel() or vector.data_ptr() != 0
    except Exception:  # of whatever kind: it is the class's own code
        return False
