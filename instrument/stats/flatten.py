"""Conversion of any tensor to a vector of real numbers, and detection of tensors without readable values."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch._C import _has_storage
from torch._C._functorch import is_functorch_wrapped_tensor, is_legacy_batchedtensor
from torch.compiler import is_compiling
from torch.nn.parameter import Parameter, is_lazy

from ..tables.reasons import WRAPPED
from ..values.dtensor import local_shard
from ..values.sparse import coalesce, is_sparse


def is_on_host(tensor: Tensor) -> bool:
    """Return whether the host can read a tensor without waiting."""
    return tensor.is_cpu


def stored_elements(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the elements of any tensor as one real vector, and how many more zeros the tensor has.

    A sparse tensor does not become dense. If it has zeros that it does not store, one of them is the last element of the
    vector. The vector then has at least one finite element, and the extremes of the tensor.

    Returns:
        Shape [elements], see `as_vector`, and the number of further zeros; 0 for a tensor that is not sparse.
    """
    if not is_sparse(tensor):
        return as_vector(tensor), 0
    stored = as_vector(coalesce(tensor.detach()).values())
    zeros = tensor.numel() - len(stored)
    return (torch.cat([stored, stored.new_zeros(1)]), zeros - 1) if zeros else (stored, 0)


def as_vector(tensor: Tensor) -> Tensor:
    """Return the elements of any tensor as one real vector, in unspecified order.

    Args:
        tensor: Any shape, dtype and device, not sparse. Complex values are replaced by their magnitude, in float64.

    Returns:
        Shape [elements], contiguous, detached; a view if the layout allows it.
    """
    tensor = tensor.detach().resolve_neg()
    # On a GPU, `unbind` would wait for the lengths. Without lengths of its own, a jagged tensor uses all values.
    if tensor.layout == torch.jagged and not tensor.is_cpu and tensor.lengths() is None:  # type: ignore[attr-defined]
        return as_vector(tensor.values())
    if tensor.is_nested:
        return torch.cat([as_vector(part) for part in tensor.unbind()])
    if tensor.layout != torch.strided:  # MKL-DNN
        tensor = tensor.to_dense()
    if tensor.is_complex():
        # In double precision, since a magnitude may overflow the dtype of its parts.
        tensor = tensor.to(torch.complex128).abs()
    if tensor.is_contiguous():
        return tensor.view(-1)
    # channels_last or transposed: statistics do not depend on the order, and the order in memory is the fastest.
    tensor = tensor.permute(order_in_memory(tensor))
    return tensor.reshape(-1).contiguous()


def order_in_memory(tensor: Tensor) -> list[int]:
    """Return the dimensions of a strided tensor in the order of `as_vector`."""
    dims = list(range(tensor.dim()))
    return dims if tensor.is_contiguous() else sorted(dims, key=tensor.stride, reverse=True)


def unreadable(tensor: Tensor) -> str | None:
    """Return why the values of a tensor, or of its shard of this process, cannot be read, as a cause for coverage; None if they can."""
    if is_wrapped(tensor):
        return WRAPPED
    part = local_shard(tensor, wait=False)
    if is_lazy(part):
        return "the tensor has no values yet: it is a parameter or a buffer of a lazy module that has not run a forward pass"
    if part.is_meta:
        return "the tensor is on the meta device, which stores shapes but no values"
    if part.is_quantized:
        return f"the tensor is quantized ({part.dtype}): hook the layer before quantize or after dequantize"
    # torch.export would trace the test.
    if type(part) not in (Tensor, Parameter) and (is_compiling() or not _has_memory(part)):
        kind = type(part).__name__
        return f"the tensor is a {kind}, whose values are not stored in memory like those of a plain tensor"
    if not _is_numeric(part.dtype):
        return f"PyTorch cannot convert elements of type {part.dtype} to numbers"
    return None


def is_wrapped(tensor: Tensor) -> bool:
    """Return whether a transform of `torch.func`, or `is_grads_batched` of autograd, wraps a tensor."""
    return not _has_storage(tensor) and (is_functorch_wrapped_tensor(tensor) or is_legacy_batchedtensor(tensor))


@cache
def _is_numeric(dtype: torch.dtype) -> bool:
    """Return whether PyTorch converts elements of a dtype to float64, or to complex128."""
    try:
        torch.empty(1, dtype=dtype, device="cpu").to(torch.complex128 if dtype.is_complex else torch.float64)
    except RuntimeError:  # includes NotImplementedError
        return False
    return True


def _has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor subclass converts to a vector with a memory address. A fake tensor does not."""
    try:
        vector, _ = stored_elements(tensor)
        return not vector.numel() or vector.data_ptr() != 0
    except Exception:  # code of the subclass, which can raise anything
        return False
