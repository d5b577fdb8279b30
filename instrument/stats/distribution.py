"""Quantiles and histograms of a tensor.

Quantiles use all elements up to twice `SAMPLE`, and a sample of larger tensors. The rank error of a sample is 0.4% at
the median (one standard deviation, sqrt(q (1 - q) / SAMPLE)) and smaller towards the ends. A histogram counts every
element.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .cpu_kernel import add_to_bins
from .device_choice import histogram_on_device
from .flatten import stored_elements
from .measure import measure_statistics
from .portable import constants, widest

SAMPLE = 16_384  # sorted and gathered in about 0.2 ms
GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0  # the fractional parts of its multiples are evenly distributed (Weyl)
# A width whose inverse might overflow, and the factor that is applied to it first.
NARROW, WIDER = 2.0**-1000, 2.0**600

Distribution = Sequence[float | None] | Tensor
"""The result of `distribution`: numbers, None for no value; or on the device of the tensor, NaN for no value."""


def distribution(tensor: Tensor, levels: tuple[float, ...], bins: int) -> Distribution:
    """Compute quantiles and a histogram of the finite elements.

    Quantiles are interpolated linearly between elements ("linear", Hyndman & Fan 1996, type 7). The bins have equal
    width from the minimum to the maximum. An element on an edge belongs to the bin above it, the maximum to the last
    bin. If all elements are equal, they are in the first bin.

    Args:
        tensor: Any shape, layout, dtype and device. It is not modified.
        levels: The levels of the quantiles, from 0 to 1; empty for no quantiles.
        bins: The number of bins; 0 for no histogram.

    Returns:
        The number of elements used for the quantiles, the quantiles, the minimum, the maximum and the counts, as
        requested.
    """
    vector, zeros = stored_elements(tensor)
    if not vector.is_cpu:
        return distribution_on_device(vector, levels, bins, zeros)
    numbers: list[float | None] = []
    if levels:
        numbers += _quantiles(vector, levels, zeros)
    if bins:
        numbers += _histogram(vector, bins, zeros)
    return numbers


def _sample(vector: Tensor, zeros: int) -> tuple[Tensor, int]:
    """Return the elements for the quantiles, and how many more zeros they have; see `stored_elements`."""
    if len(vector) <= 2 * SAMPLE:
        return vector, zeros
    sample = vector[_sample_indices(len(vector), vector.device)]
    # The last element is one of the zeros.
    return (torch.cat([sample, vector[-1:]]), round(zeros * SAMPLE / len(vector))) if zeros else (sample, 0)


def _quantiles(vector: Tensor, levels: tuple[float, ...], zeros: int) -> list[float | None]:
    sample, zeros = _sample(vector, zeros)
    narrow = sample.dtype in (torch.float16, torch.bfloat16, torch.float32)
    x = sample.to(torch.float32 if narrow else torch.float64).numpy()
    x = np.sort(x[np.isfinite(x)])
    if not len(x):
        return [0, *[None] * len(levels)]
    n, first_zero = len(x) + zeros, np.searchsorted(x, 0.0)
    at = np.asarray(levels) * (n - 1)
    below = np.floor(at).astype(np.int64)
    ranks = (np.minimum(rank, n - 1) for rank in (below, below + 1))
    # The first zero stands for all further ones.
    indices = (np.where(rank < first_zero, rank, np.maximum(rank - zeros, first_zero)) for rank in ranks)
    low, high = (x[index].astype(np.float64) for index in indices)
    fraction = at - below
    return [n, *np.clip(low * (1.0 - fraction) + high * fraction, low, high).tolist()]


def _histogram(vector: Tensor, bins: int, zeros: int) -> list[float | None]:
    low, high = measure_statistics(vector, ("min", "max"))
    counts = np.zeros(bins, np.int64)
    if low is not None and high is not None:
        wide = vector.to(torch.float32) if vector.dtype == torch.float16 else vector
        if not add_to_bins(wide, low, high, counts):
            return [low, high, *map(int, _histogram_by_operations(vector, bins, zeros)[2:].tolist())]
        if zeros:
            bin_of_zero = np.zeros(bins, np.int64)
            add_to_bins(wide[-1:], low, high, bin_of_zero)
            counts += zeros * bin_of_zero
    return [low, high, *counts.tolist()]


def distribution_on_device(vector: Tensor, levels: tuple[float, ...], bins: int, zeros: int = 0) -> Tensor:
    """Return `distribution` of `stored_elements` without branches on values, so that the host never waits for the device."""
    parts = []
    if levels:
        parts.append(_quantiles_on_device(vector, levels, zeros))
    if bins:
        by_kernel = None if zeros else histogram_on_device(vector, bins)
        parts.append(_histogram_by_operations(vector, bins, zeros) if by_kernel is None else by_kernel)
    return torch.cat(parts)


def _quantiles_on_device(vector: Tensor, levels: tuple[float, ...], zeros: int) -> Tensor:
    """Compute quantiles in at most 28 launches, or 34 with further zeros."""
    dtype = widest(vector.device)
    if not len(vector):
        return torch.tensor([0.0, *[math.nan] * len(levels)], dtype=dtype, device=vector.device)
    sample, zeros = _sample(vector, zeros)
    wide = _comparable(sample)
    ordered = torch.nan_to_num(wide, nan=math.inf, posinf=math.inf, neginf=math.inf).sort().values
    n = (ordered < math.inf).sum()
    n = n + zeros if zeros else n
    last = (n - 1).clamp(min=0)
    at = constants(levels, dtype, vector.device) * last
    below = at.long()
    ranks = [below, torch.minimum(below + 1, last)]
    if zeros:  # The first zero stands for all further ones.
        first_zero = (ordered < 0).sum()
        ranks = [torch.where(rank < first_zero, rank, (rank - zeros).maximum(first_zero)) for rank in ranks]
    low, high = (ordered[rank].to(dtype) for rank in ranks)
    fraction = at - below
    value = low * (1.0 - fraction) + high * fraction
    value = torch.maximum(torch.minimum(value, high), low)
    return torch.cat([n[None].to(dtype), torch.where(n > 0, value, math.nan)])


def _comparable(sample: Tensor) -> Tensor:
    """Return the elements; float8, which supports few operations, and integers as wider floats."""
    if sample.is_floating_point():
        return sample.to(torch.float32) if sample.element_size() == 1 else sample
    return sample.to(torch.float32 if sample.element_size() <= 2 else widest(sample.device))


def _histogram_by_operations(vector: Tensor, bins: int, zeros: int) -> Tensor:
    """Compute a histogram on any device. Same computation as `histogram` in native.c."""
    x = vector.to(widest(vector.device))
    if not len(x):
        return torch.cat([x.new_full((2,), math.nan), x.new_zeros(bins)])
    counts = x.new_zeros(bins + 1)
    finite = x.isfinite()
    any_finite = finite.any()
    low = torch.where(finite, x, math.inf).amin()
    high = torch.where(finite, x, -math.inf).amax()
    width = high - low
    one = torch.ones_like(width)
    unit = torch.where(width.isfinite(), torch.where((width > 0) & (width < NARROW), WIDER * one, one), 0.5 * one)
    scale = torch.where(high > low, bins / (high * unit - low * unit), 0.0)
    at = (torch.where(finite, x * unit - low * unit, 0.0) * scale).long().clamp(0, bins - 1)
    weights = torch.ones_like(x)
    if zeros:
        weights[-1] += zeros
    counts.scatter_add_(0, torch.where(finite, at, bins), weights)
    ends = torch.where(any_finite, torch.stack([low, high]), math.nan)
    return torch.cat([ends, counts[:bins]])


@lru_cache(maxsize=128)
def _sample_indices(numel: int, device: torch.device) -> Tensor:
    """Return one index in each of `SAMPLE` equal intervals, at varying positions, so that every channel is sampled."""
    interval = torch.arange(SAMPLE, dtype=torch.float64, device=device)
    at = (interval + (interval * GOLDEN) % 1.0) * (numel / SAMPLE)
    return at.long().clamp(max=numel - 1)
