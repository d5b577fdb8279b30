"""Sums of a tensor by PyTorch operations on any device, for tensors that the kernels do not support.

No operation waits for a device or branches on a value. They read copies in float64, or in float32 on devices without it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..tables.statistics import Sum
from ..values.nested import to_device
from .sums import BASE

PART = 1 << 20
"""The number of elements of a part of a tensor that is converted at once."""
# Its exp is zero in float32, and negligible in float64; unlike that of minus infinity, their product is no NaN.
_LEAST_EXPONENT = -700.0
SAFE_EXPONENT = 200
"""Powers of two up to this one neither overflow nor underflow float64 if they are raised to the fourth power."""
# For each dtype, integers of the same size, the bits of the exponent, and the largest unit whose inverse is finite.
_FORMATS = {torch.float64: (torch.int64, 0x7FF << 52, 2.0**1000), torch.float32: (torch.int32, 0xFF << 23, 2.0**120)}
_BYTE = 255  # as many ones fit into one byte
_LANES = _BYTE * 8


def widest(device: torch.device) -> torch.dtype:
    """Return the floating-point dtype of the highest precision on a device: float64, except on Apple's GPUs."""
    return torch.float32 if device.type == "mps" else torch.float64


def float32_or_wider(dtype: torch.dtype) -> torch.dtype:
    """Return float32, or the dtype if it is wider. PyTorch does not promote float8."""
    return torch.float32 if dtype.itemsize == 1 else torch.promote_types(dtype, torch.float32)


def parts_of(tensor: Tensor) -> Sequence[Tensor]:
    """Return parts of a strided tensor along dimension 0 with about `PART` elements, whose copies in another dtype are small."""
    parts: tuple[Tensor, ...] = tensor.split(max(1, PART // max(1, math.prod(tensor.shape[1:]))))
    return parts


def softmax_of(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return logsumexp, and the entropy of softmax in nats, of each row of logits [N, classes]: [N] each, in the widest dtype.

    With s = x - max(x) and Z = sum(exp(s)), the entropy is log(Z) + sum(-s exp(s)) / Z. No term is negative. Logits of at least
    float32 are therefore sufficient. NaN for a row with NaN, plus infinity, or only minus infinity.
    """
    dtype = widest(logits.device)
    largest = logits.amax(-1, keepdim=True)
    shifted = (logits - largest).clamp_(min=_LEAST_EXPONENT)
    weights = shifted.exp()
    total = weights.to(dtype).sum(-1)  # faster than `sum` with a dtype
    log_total = total.log()
    entropies = log_total - weights.mul_(shifted).to(dtype).sum(-1) / total
    return largest[:, 0].to(dtype) + log_total, entropies


@lru_cache(maxsize=128)
def constants(numbers: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return constants [numbers] on a device. They are copied to it once, without waiting."""
    with torch.inference_mode(False):
        moved: Tensor = to_device(torch.tensor(numbers, dtype=dtype), device)
    return moved


def portable_sums(flat: Tensor) -> Tensor:
    """Return the sums of a tensor, with NaN for the magnitudes, in 39 launches.

    Args:
        flat: Any real dtype, shape [elements], without graph.

    Returns:
        The columns `MEASURED_COLUMNS` on the device of the tensor, in its widest dtype. Without a finite element, the extremes are
        infinite, and what follows from them is NaN.
    """
    x = flat.to(widest(flat.device))
    if not len(x):
        return torch.cat([x.new_zeros(3), x.new_full((len(BASE) - 4,), math.nan)])
    is_finite = x.abs() < math.inf
    n = is_finite.sum(dtype=x.dtype)
    low, high = torch.where(is_finite, x, math.inf).amin(), torch.where(is_finite, x, -math.inf).amax()
    unit = _unit(torch.maximum(high, -low))
    # Relative to an element, so that a spread in the last bits of a large mean is exact.
    origin = low / unit
    moved = torch.where(is_finite, x / unit - origin, 0.0)
    distance = moved.sum() / n
    moved = torch.where(is_finite, moved - distance, 0.0)
    rest = moved.sum()  # the rounding error of the mean
    mean = origin + (distance + rest / n)
    deviations = (torch.dot(moved, moved) - rest * rest / n).clamp(min=0.0)
    nan, zeros = (mask.sum(dtype=x.dtype) for mask in (x.isnan(), x == 0))
    return torch.stack([n, nan, zeros, low, high, mean, deviations, x.new_full((), math.nan), unit])


def further_sums(flat: Tensor, base: Tensor, sums: Sequence[Sum]) -> list[Tensor]:
    """Return sums that the other ways of measuring do not form, as scalars.

    Args:
        flat: Any real dtype, shape [elements], without graph.
        base: The sums `BASE` of the tensor on its device, [columns].
    """
    x = flat.to(base.dtype)
    is_finite = x.abs() < math.inf
    numbers = dict(zip(BASE, base.unbind(), strict=False))
    y, mean = x / numbers["unit"], numbers["mean"]
    # A small spread is exact, unlike its mean.
    moved = torch.where(is_finite, y - mean, 0.0)
    rest = moved.sum() / numbers["n"]
    scalars = []
    for each in sums:
        assert each.term is not None, "only sums with a term are measured here"
        elements, of_mean = (
            (moved, rest) if each.is_central else (y, mean) if each.power else (x, mean * numbers["unit"])
        )
        scalars.append(torch.where(is_finite, each.term(elements, of_mean), 0.0).sum(dtype=base.dtype))
    return scalars


def _unit(largest: Tensor) -> Tensor:
    """Return the power of two of the largest magnitude. Powers of elements that are divided by it do not overflow."""
    integer, exponent, most = _FORMATS[largest.dtype]
    power: Tensor = largest.view(integer).bitwise_and(exponent).view(largest.dtype)
    return power.clamp(1.0 / most, most)


def count_changed(before: Tensor, after: Tensor) -> Tensor:
    """Count the elements that differ between two tensors of the same shape and dtype, int64. NaN that stays NaN is equal."""
    counts = count_masks([before != after, before.isnan().logical_and_(after.isnan())])
    changed: Tensor = counts[0] - counts[1]
    return changed


def count_masks(masks: Sequence[Tensor]) -> Tensor:
    """Count the true elements of masks of the same size, int64 [masks].

    `torch.sum` and `torch.count_nonzero` would first copy a mask on a GPU to int64, eight times its size. Eight elements are
    added at once instead, as the bytes of an integer.
    """
    numel = masks[0].numel()
    rows = masks[0].new_empty((len(masks), -(-numel // _LANES) * _LANES))
    rows[:, numel:].zero_()
    for row, mask in zip(rows, masks, strict=True):
        row[:numel].view(mask.shape).copy_(mask)
    sums = rows.view(torch.int64).view(len(rows), -1, _BYTE).sum(-1)
    return sums.view(torch.uint8).sum(-1)
