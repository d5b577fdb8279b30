"""Sparse tensors: their stored values, and the replacement of these."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BY_ROWS = (torch.sparse_csr, torch.sparse_bsr)
_LAYOUTS = (torch.sparse_coo, *_BY_ROWS, torch.sparse_csc, torch.sparse_bsc)


def is_sparse(tensor: Tensor) -> bool:
    """Return whether a tensor has one of PyTorch's sparse layouts: COO, CSR, CSC, BSR or BSC."""
    return tensor.layout in _LAYOUTS


def coalesce(tensor: Tensor) -> Tensor:
    """Return a sparse tensor that stores each element at most once. Only COO stores several terms of an element."""
    return tensor.coalesce() if tensor.layout == torch.sparse_coo else tensor


def as_coo(tensor: Tensor) -> Tensor:
    """Return a sparse tensor in the layout COO, coalesced. It stores what the tensor stores."""
    return tensor.to_sparse(layout=torch.sparse_coo).coalesce()


def replace_values(tensor: Tensor, values: Tensor) -> Tensor:
    """Return a result of `coalesce` with other stored values of the same shape."""
    if tensor.layout == torch.sparse_coo:
        return torch.sparse_coo_tensor(
            tensor.indices(), values, tensor.shape, is_coalesced=True, check_invariants=False
        )
    by_rows = tensor.layout in _BY_ROWS
    return torch.sparse_compressed_tensor(
        tensor.crow_indices() if by_rows else tensor.ccol_indices(),
        tensor.col_indices() if by_rows else tensor.row_indices(),
        values,
        tensor.shape,
        layout=tensor.layout,
        check_invariants=False,
    )


def alias_of(tensor: Tensor) -> Tensor:
    """Return a tensor with the same values as a separate node of the graph: a view, or a copy of a sparse tensor."""
    return tensor.clone() if is_sparse(tensor) else tensor.view_as(tensor)


def first_elements(tensor: Tensor, count: int) -> Tensor:
    """Return the first elements of a sparse tensor in row-major order as a dense vector, shape [count]."""
    coo = as_coo(tensor)
    indices, values = coo.indices(), coo.values()
    size = math.prod(values.shape[1:])  # elements of each stored value
    starts = torch.zeros_like(indices[0])
    for along, length in zip(indices, coo.shape, strict=False):
        starts = starts * length + along
    starts *= size
    is_first = starts < count
    places = starts[is_first, None] + torch.arange(size, device=tensor.device)
    elements = values.new_zeros(count + size)
    elements[places.reshape(-1)] = values[is_first].reshape(-1)
    return elements[:count]
