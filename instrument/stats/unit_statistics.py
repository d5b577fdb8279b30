"""Sums that depend on the module of a tensor: dead units and saturated elements."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..values.sparse import as_coo, is_sparse
from .directed_rounding import round_down, round_up
from .flatten import is_on_host, stored_elements
from .portable import count_masks

# Fraction of the output range: |tanh| > 0.97, as in Karpathy's lectures on activations ("makemore", part 3).
NEAR = 0.015
CHANNELS_FIRST = (
    *(nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.InstanceNorm1d, nn.GroupNorm),
    *(nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d),
)
FEATURES_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding)


def unit_dim(dims: int, module: nn.Module, *, of_parameter: bool) -> int | None:
    """Return the default dimension of the units; None for scalars, and for vectors that are not a parameter.

    Args:
        dims: The number of dimensions of the tensor. A parameter: [out, ...]. Otherwise: [N, C], [N, T, C], [N, C, H, W] or
            [N, C, D, H, W]; for modules in `CHANNELS_FIRST` [N, C, L], for modules in `FEATURES_LAST` [N, ..., C].
        of_parameter: Whether the tensor is a parameter, its gradient, its update or similar.
    """
    if of_parameter:
        return 0 if dims else None
    if dims < 2:
        return None
    if isinstance(module, FEATURES_LAST) or (dims == 3 and not isinstance(module, CHANNELS_FIRST)):
        return dims - 1
    return 1


def dead_units(tensor: Tensor, dim: int) -> Tensor:
    """Return which units are zero everywhere, bool [units] on the device of the tensor. All units of an empty tensor are.

    Args:
        tensor: Any dtype with at least one dimension, strided or sparse.

    Raises:
        IndexError: The tensor has no such dimension.
    """
    x = tensor.detach()
    kept = range(x.dim())[dim]
    others = [other for other in range(x.dim()) if other != kept]
    if not x.numel():
        return torch.ones(x.shape[dim], dtype=torch.bool, device=x.device)
    if is_sparse(x):
        return _dead_units_of_sparse(x, dim)
    return _dead(x, others) if is_on_host(x) and others else _all_zero(x, others)


def _dead_units_of_sparse(tensor: Tensor, dim: int) -> Tensor:
    """Return which units of a sparse tensor have no stored value that differs from zero, shape [units]."""
    tensor, dim = as_coo(tensor), range(tensor.dim())[dim]
    alive = _comparable(tensor.values()) != 0  # [stored, dense dimensions]
    at = dim - tensor.sparse_dim()
    if at >= 0:
        return ~alive.movedim(at + 1, -1).reshape(-1, tensor.shape[dim]).any(0)
    counts = torch.zeros(tensor.shape[dim], dtype=torch.int32, device=tensor.device)
    return counts.index_add_(0, tensor.indices()[dim], alive.reshape(len(alive), -1).any(1).int()) == 0


def _dead(tensor: Tensor, others: list[int]) -> Tensor:
    """Return which units are zero everywhere, shape [units]. Tests a few samples first: one nonzero value is sufficient."""
    along = others[0]
    begin, size = 0, 1
    dead = torch.ones((), dtype=torch.bool)
    while begin < tensor.shape[along] and dead.any():
        part = tensor.narrow(along, begin, min(size, tensor.shape[along] - begin))
        dead = dead & _all_zero(part, others)
        begin, size = begin + size, 2 * size
    return dead


def _all_zero(tensor: Tensor, others: list[int]) -> Tensor:
    """Return which units are zero along all other dimensions, shape [units]."""
    tensor = _comparable(tensor)
    magnitudes = tensor.abs() if tensor.is_floating_point() or tensor.is_complex() else tensor != 0
    return (magnitudes.amax(others) if others else magnitudes) == 0


def saturation_limits(module: nn.Module) -> tuple[float | None, float] | None:
    """Return the limits of an activation at which its gradient vanishes; None for modules without known limits."""
    match module:
        case nn.ReLU6():
            return None, 6.0
        case nn.Hardtanh():
            return float(module.min_val), float(module.max_val)
        case nn.Tanh() | nn.Softsign():
            return -1.0, 1.0
        case nn.Sigmoid() | nn.Hardsigmoid():
            return 0.0, 1.0
    return None


def count_saturated(tensor: Tensor, ends: tuple[float | None, float]) -> Tensor:
    """Count the finite elements within 1.5% of the output range from one of its ends, in at most 11 launches.

    Args:
        tensor: Any shape, floating point, strided or sparse.
        ends: The lower and the upper end. A lower end of None counts as 0 for the range, but elements near it do not
            count.

    Returns:
        int64, a scalar on the device of the tensor.
    """
    x, zeros = stored_elements(tensor) if is_sparse(tensor) else (tensor.detach(), 0)
    x = _comparable(x)
    near = _near(x, ends).logical_and_(x.abs() < math.inf)
    saturated = near.count_nonzero() if is_on_host(x) else count_masks([near])[0]
    return saturated + zeros * int(_near(torch.zeros((), device="cpu"), ends)) if zeros else saturated


def _near(tensor: Tensor, ends: tuple[float | None, float]) -> Tensor:
    """Return which elements are near an end or beyond it, with the shape of the tensor. NaN is not."""
    low, high = ends
    margin = NEAR * (high - (low or 0.0))
    # PyTorch rounds the bound of a comparison to the dtype of the tensor. These bounds are representable already.
    near = tensor >= round_up(high - margin, tensor.dtype)
    return near if low is None else near | (tensor <= round_down(low + margin, tensor.dtype))


def _comparable(tensor: Tensor) -> Tensor:
    """Return the tensor; float8, which supports few operations, as float32."""
    return tensor.to(torch.float32) if tensor.is_floating_point() and tensor.element_size() == 1 else tensor
