"""The one function that measures a tensor, and the two ways it has of doing so.

On the CPU the tensor is read in blocks that fit a cache, each centred and summed in float64, and the blocks'
moments are merged (Chan, Golub & LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample
variances"). On any other device the same numbers are formed by whole-tensor operations that never wait for the
device; they stay there until the step ends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..spec.statistics import ALL

BLOCK = 65_536  # elements; in float64 half a megabyte, which stays in the L2 cache
SAFE_EXPONENT = 400  # of two: sums of squares up to here neither overflow float64 nor vanish in it
MOST_EXPONENT = 1000  # of two: what is divided by, and multiplied with again, is a number itself

Values = Sequence[float | None] | Tensor
"""What `measure` gives: numbers, or a float64 tensor of shape [statistics] on the device, NaN where there is none."""


@torch.no_grad()
def measure(tensor: Tensor, names: Sequence[str]) -> Values:
    """Statistics of a tensor of any shape, layout, dtype and device.

    Args:
        tensor: What is measured; it is read, never written.
        names: Names from `instrument.spec.statistics.STATISTICS`.

    Returns:
        The values in the order of `names`: numbers and None for a tensor on the CPU; a float64 tensor of shape
        [len(names)] on the tensor's own device elsewhere, in which NaN stands for None.
    """
    flat = _flat(tensor.detach())
    if flat.device.type == "cpu":
        values = _measure_blocks(flat, "l1" in names)
        return [values[name] for name in names]
    return measure_on_device(flat, names)


def _flat(tensor: Tensor) -> Tensor:
    """The elements as one real vector, without a copy where the layout lets us."""
    if tensor.is_nested:
        return torch.cat([_flat(part) for part in tensor.unbind()])
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = tensor.to(torch.complex128).abs()  # a magnitude may be larger than its parts' type can hold
    if tensor.is_contiguous():
        return tensor.view(-1)
    if tensor.dim() > 1:  # channels_last, transposed: statistics do not ask for an order, memory's own is the fastest
        by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        tensor = tensor.permute(by_stride)
    return tensor.reshape(-1)


def _measure_blocks(flat: Tensor, with_l1: bool) -> dict[str, float | None]:
    """All statistics of a flat CPU tensor; `l1` only where it is wanted, since it costs a pass."""
    unit = _unit(flat) if flat.dtype == torch.float64 else 1.0
    nan_count = inf_count = zeros = n = 0
    pivot = mean = m2 = squares = l1 = 0.0
    low, high = math.inf, -math.inf
    for start in range(0, flat.numel(), BLOCK):
        block = flat[start : start + BLOCK].to(torch.float64)
        smallest, largest = (bound.item() for bound in torch.aminmax(block))
        if not (math.isfinite(smallest) and math.isfinite(largest)):
            block, nans, infs = _finite(block)
            nan_count, inf_count = nan_count + nans, inf_count + infs
            if not block.numel():
                continue
            smallest, largest = (bound.item() for bound in torch.aminmax(block))
        size = block.numel()
        low, high = min(low, smallest), max(high, largest)
        zeros += size - int(torch.count_nonzero(block))
        if unit != 1.0:
            block = block / unit
        squares += torch.dot(block, block).item()
        if with_l1:
            l1 += block.abs().sum().item()
        if n == 0:
            pivot = smallest / unit  # means are formed above it, so that equal values have no spread at all
        moved = block - pivot
        block_mean = moved.sum().item() / size
        centred = moved.sub_(block_mean)
        drift = centred.sum().item()  # what rounding left in the mean
        block_m2 = torch.dot(centred, centred).item() - drift * drift / size
        delta, total = block_mean - mean, n + size
        mean += delta * size / total
        m2 += block_m2 + delta * delta * n * size / total
        n = total
    counts: dict[str, float | None] = {"numel": flat.numel(), "nan_count": nan_count, "inf_count": inf_count}
    if n == 0:
        return dict.fromkeys(ALL) | counts
    return counts | {
        "mean": (pivot + mean) * unit,
        "std": math.sqrt(max(m2, 0.0) / n) * unit,
        "rms": math.sqrt(squares / n) * unit,
        "min": low,
        "max": high,
        "abs_max": max(abs(low), abs(high)),
        "l1": l1 * unit,
        "l2": math.sqrt(squares) * unit,
        "zero_fraction": zeros / n,
    }


def _unit(flat: Tensor) -> float:
    """A power of two to measure in, so that no square of a float64 overflows or vanishes; 1 where none would."""
    finite = flat[flat.isfinite()]
    exponent = math.frexp(finite.abs().max().item())[1] if finite.numel() else 0
    return 1.0 if abs(exponent) <= SAFE_EXPONENT else 2.0 ** max(-MOST_EXPONENT, min(exponent, MOST_EXPONENT))


def _finite(block: Tensor) -> tuple[Tensor, int, int]:
    """The finite elements, and how many of the others are NaN and infinite."""
    nans, infs = int(block.isnan().sum()), int(block.isinf().sum())
    return block[block.isfinite()], nans, infs


def measure_on_device(flat: Tensor, names: Sequence[str]) -> Tensor:
    """All statistics of a flat tensor with no branch on its values, and so with no wait for its device.

    Returns:
        float64, shape [len(names)], on the tensor's device; NaN where a statistic has no value.
    """
    x = flat.to(torch.float64)
    finite = x.isfinite()
    n = finite.sum(dtype=torch.float64)
    kept = torch.where(finite, x, 0.0)
    unit = _unit_on_device(kept) if flat.dtype == torch.float64 and x.numel() else torch.ones_like(n)
    kept = kept / unit
    none = torch.where(n == 0, math.nan, 0.0)  # added to what has no value where nothing is finite
    squares = kept.square().sum()
    if x.numel():
        low = torch.where(finite, x, math.inf).amin()
        high = torch.where(finite, x, -math.inf).amax()
    else:
        low = high = none
    pivot = low / unit
    moved = torch.where(finite, kept - pivot, 0.0)
    mean = moved.sum() / n
    centred = torch.where(finite, moved - mean, 0.0)
    drift = centred.sum()
    values = {
        "numel": torch.full_like(n, x.numel()),
        "mean": (pivot + mean) * unit,
        "std": ((centred.square().sum() - drift * drift / n) / n).clamp(min=0.0).sqrt() * unit,
        "rms": (squares / n).sqrt() * unit,
        "min": low + none,
        "max": high + none,
        "abs_max": torch.maximum(low.abs(), high.abs()) + none,
        "l1": kept.abs().sum() * unit + none,
        "l2": squares.sqrt() * unit + none,
        "zero_fraction": ((x == 0).sum(dtype=torch.float64)) / n,
        "nan_count": x.isnan().sum(dtype=torch.float64),
        "inf_count": x.isinf().sum(dtype=torch.float64),
    }
    return torch.stack([values[name] for name in names])


def _unit_on_device(kept: Tensor) -> Tensor:
    """As `_unit`, of finite values and without a branch on them."""
    exponent = torch.frexp(kept.abs().amax()).exponent.clamp(-MOST_EXPONENT, MOST_EXPONENT)
    return torch.exp2(exponent.to(torch.float64))
