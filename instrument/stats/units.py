"""What a tensor says of its module's units: which of them are dead, how much of it is saturated."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .kernel import measure
from .rounding import round_down, round_up

NEAR = 0.015  # of the range: |tanh| > 0.97, as in Karpathy's lectures on activations ("makemore", part 3)


CHANNELS_FIRST = (
    *(nn.Conv1d, nn.ConvTranspose1d, nn.BatchNorm1d, nn.InstanceNorm1d, nn.GroupNorm),
    *(nn.MaxPool1d, nn.AvgPool1d, nn.AdaptiveAvgPool1d, nn.AdaptiveMaxPool1d),
)
FEATURES_LAST = (nn.Linear, nn.LayerNorm, nn.Embedding)


def unit_dim(tensor: Tensor, module: nn.Module, *, of_parameter: bool) -> int | None:
    """The dimension that units are along, where nobody has said it; None for scalars, and vectors that are no parameter.

    Args:
        tensor: Any shape: [out, ...] of a parameter, else [N, C], [N, T, C], [N, C, H, W] or [N, C, D, H, W]; of modules that
            say so [N, C, L] and [N, ..., C].
        module: Whose tensor it is.
        of_parameter: Whether it is a parameter, its gradient, its update or the like.
    """
    if of_parameter:
        return 0 if tensor.dim() else None
    if tensor.dim() < 2:
        return None
    if isinstance(module, FEATURES_LAST) or (tensor.dim() == 3 and not isinstance(module, CHANNELS_FIRST)):
        return tensor.dim() - 1
    return 1


def dead_fraction(tensor: Tensor, dim: int) -> float | Tensor | None:
    """The share of units all of whose elements are zero; NaN is not zero.

    Args:
        tensor: Any dtype with at least one dimension, strided. On the CPU no more of it is looked at than it takes.
        dim: The dimension that the units are along.

    Returns:
        A number from 0 to 1 on the CPU, None without a unit or an element; a float64 scalar on any other device.

    Raises:
        IndexError: The tensor has no such dimension.
    """
    if not tensor.numel():
        return None
    if not tensor.is_cpu:
        return dead_fraction_on_device(tensor.detach(), dim)
    dead = dead_units(tensor, dim)
    return int(dead.sum()) / len(dead)


def dead_fraction_on_device(tensor: Tensor, dim: int) -> Tensor:
    """The same with no branch on the values: a float64 scalar on the tensor's device."""
    return _zero_throughout(tensor, _all_but(tensor, dim)).to(torch.float64).mean()


def dead_units(tensor: Tensor, dim: int) -> Tensor:
    """Which units are zero throughout, bool [units] on the tensor's device; of a tensor without elements all of them.

    Args:
        tensor: Any dtype with at least one dimension, strided. On the CPU no more of it is looked at than it takes.
        dim: The dimension that the units are along.

    Raises:
        IndexError: The tensor has no such dimension.
    """
    x = tensor.detach()
    others = _all_but(x, dim)
    if not x.numel():
        return torch.ones(x.shape[dim], dtype=torch.bool, device=x.device)
    return _dead(x, others) if x.is_cpu and others else _zero_throughout(x, others)


def _all_but(tensor: Tensor, dim: int) -> list[int]:
    kept = range(tensor.dim())[dim]
    return [other for other in range(tensor.dim()) if other != kept]


def _dead(tensor: Tensor, others: list[int]) -> Tensor:
    """Which units are zero throughout, shape [units]; of few samples first, since one that is not zero is enough."""
    along = others[0]
    begin, size = 0, 1
    dead = torch.ones((), dtype=torch.bool)
    while begin < tensor.shape[along] and dead.any():
        part = tensor.narrow(along, begin, min(size, tensor.shape[along] - begin))
        dead = dead & _zero_throughout(part, others)
        begin, size = begin + size, 2 * size
    return dead


def _zero_throughout(tensor: Tensor, others: list[int]) -> Tensor:
    """Which units are zero along all other dimensions, shape [units]."""
    tensor = _comparable(tensor)
    magnitudes = tensor.abs() if tensor.is_floating_point() or tensor.is_complex() else tensor != 0
    return (magnitudes.amax(others) if others else magnitudes) == 0


def range_of(module: nn.Module) -> tuple[float | None, float] | None:
    """The ends of what an activation can give at which its gradient vanishes; None where it has none that we know."""
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


def saturated_fraction(tensor: Tensor, ends: tuple[float | None, float]) -> float | Tensor | None:
    """The share of the finite elements that lie within 1.5% of the range of an end of it.

    Args:
        tensor: Any shape, floating point.
        ends: The lower and the upper end; a lower end of None counts as 0, and is not looked at.

    Returns:
        A number from 0 to 1 on the CPU, None where nothing is finite; a float64 scalar on any other device, NaN for None.
    """
    x = _comparable(tensor.detach())
    if not x.is_cpu:
        return saturated_fraction_on_device(x, ends)
    nans, infinities = (int(count) for count in measure(x, ("nan_count", "inf_count")) if count is not None)
    finite = x.numel() - nans - infinities
    near = _near(x, ends)
    return int((near & x.isfinite() if infinities else near).count_nonzero()) / finite if finite else None


def saturated_fraction_on_device(tensor: Tensor, ends: tuple[float | None, float]) -> Tensor:
    """The same with no branch on the values: a float64 scalar on the tensor's device."""
    tensor = _comparable(tensor)
    finite = tensor.isfinite()
    return (_near(tensor, ends) & finite).sum(dtype=torch.float64) / finite.sum(dtype=torch.float64)


def _near(tensor: Tensor, ends: tuple[float | None, float]) -> Tensor:
    """Which elements are at an end or beyond it, of the tensor's shape; NaN is not."""
    low, high = ends
    margin = NEAR * (high - (low or 0.0))
    # PyTorch rounds what a tensor is compared with to the tensor's type: the bounds are such numbers already.
    near = tensor >= round_up(high - margin, tensor.dtype)
    return near if low is None else near | (tensor <= round_down(low + margin, tensor.dtype))


def _comparable(tensor: Tensor) -> Tensor:
    """The tensor; float8, which has few operations of its own, as float32."""
    return tensor.to(torch.float32) if tensor.is_floating_point() and tensor.element_size() == 1 else tensor


def ratio_of_norms(update: Tensor, parameter: Tensor) -> float | Tensor | None:
    """The norm of an update over that of its parameter after it; None, or NaN on a device, where that is zero."""
    found, of = (measure(tensor, ("l2",)) for tensor in (update, parameter))
    if isinstance(found, Tensor) and isinstance(of, Tensor):
        return torch.where(of > 0, found / of, torch.nan)[0]
    return None if not of[0] or found[0] is None else found[0] / of[0]
