"""Quantiles and histograms of a tensor.

Quantiles are of all elements up to twice `SAMPLE` of them, and of a sample beyond, whose rank is off by 0.4% at the median
(one standard deviation, sqrt(q (1 - q) / SAMPLE)) and less towards the ends. A histogram counts every element.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .kernel import Values, measure
from .single_pass import add_to_bins
from .vector import as_vector

SAMPLE = 16_384  # sorted and gathered in about 0.2 ms
GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0  # its multiples' fractions are spread evenly (Weyl)
NARROW, WIDER = 2.0**-1000, 2.0**600  # a width whose inverse might be no number, and what it is multiplied with first
BLOCK = 1 << 20  # elements that are counted at once where there is no compiled kernel

Cells = tuple[int | None, list[float] | None, list[float] | None, float | None, float | None, list[int] | None]


def distribution(tensor: Tensor, levels: tuple[float, ...], bins: int) -> Values:
    """Quantiles and a histogram of the finite elements.

    A quantile lies between two elements where its rank does, in proportion ("linear", Hyndman & Fan 1996, type 7). The
    bins are equally wide, from the smallest element to the largest; one on an edge belongs to the bin above it, the largest
    to the last bin; where all are equal they are in the first.

    Args:
        tensor: Any shape, layout, dtype and device; it is read, never written.
        levels: Of the quantiles, from 0 to 1; none for no quantiles.
        bins: Of the histogram; 0 for none.

    Returns:
        How many elements the quantiles are of, the quantiles, the smallest and the largest element and the counts, each
        only where it is asked for: numbers and None for a tensor on the CPU; a float64 tensor [numbers] on the tensor's
        own device elsewhere, in which NaN stands for None.
    """
    vector = as_vector(tensor)
    if not vector.is_cpu:
        return distribution_on_device(vector, levels, bins)
    found: list[float | None] = []
    if levels:
        found += _quantiles(vector, levels)
    if bins:
        found += _histogram(vector, bins)
    return found


def cells(levels: tuple[float, ...], bins: int, values: Sequence[float | None]) -> Cells:
    """The columns `sampled` to `counts` of the distributions table, from what `distribution` gave."""
    numbers: Iterator[Any] = (None if number is None or math.isnan(number) else number for number in values)
    sampled = quantiles = low = high = counts = None
    if levels:
        sampled = int(next(numbers))
        quantiles = [next(numbers) for _ in levels]
        quantiles = quantiles if sampled else None
    if bins:
        low, high = next(numbers), next(numbers)
        counts = [int(next(numbers)) for _ in range(bins)]
    return sampled, list(levels) or None, quantiles, low, high, counts


def _quantiles(vector: Tensor, levels: tuple[float, ...]) -> list[float | None]:
    sample = vector if len(vector) <= 2 * SAMPLE else vector[_places(len(vector), vector.device)]
    narrow = sample.dtype in (torch.float16, torch.bfloat16, torch.float32)
    x = sample.to(torch.float32 if narrow else torch.float64).numpy()
    x = np.sort(x[np.isfinite(x)])
    if not len(x):
        return [0, *[None] * len(levels)]
    at = np.asarray(levels) * (len(x) - 1)
    below = np.floor(at).astype(np.int64)
    low, high = (x[np.minimum(index, len(x) - 1)].astype(np.float64) for index in (below, below + 1))
    share = at - below
    return [len(x), *np.clip(low * (1.0 - share) + high * share, low, high).tolist()]


def _histogram(vector: Tensor, bins: int) -> list[float | None]:
    low, high = measure(vector, ("min", "max"))
    counts = np.zeros(bins, np.int64)
    if low is not None and high is not None:
        float_low, float_high = float(low), float(high)
        wide = vector.to(torch.float32) if vector.dtype == torch.float16 else vector
        if not add_to_bins(wide, float_low, float_high, counts):
            for block in vector.split(BLOCK):
                _add_block(block.to(torch.float64).numpy(), float_low, float_high, counts)
    return [None if low is None else float(low), None if high is None else float(high), *counts.tolist()]


def _add_block(x: np.ndarray[Any, np.dtype[np.float64]], low: float, high: float, counts: np.ndarray[Any, Any]) -> None:
    """As `histogram` in native.c."""
    x = x[np.isfinite(x)]
    width = high - low
    unit = 0.5 if not math.isfinite(width) else WIDER if 0.0 < width < NARROW else 1.0
    scale = len(counts) / (high * unit - low * unit) if high > low else 0.0
    at = ((x * unit - low * unit) * scale).astype(np.int64)
    counts += np.bincount(np.minimum(at, len(counts) - 1), minlength=len(counts))


def distribution_on_device(vector: Tensor, levels: tuple[float, ...], bins: int) -> Tensor:
    """The same of a vector on any device, with no branch on its values, and so with no wait for the device.

    Returns:
        float64, shape [numbers], on the vector's device; NaN where there is no number.
    """
    found: list[Tensor] = []
    if levels:
        sample = vector if len(vector) <= 2 * SAMPLE else vector[_places(len(vector), vector.device)]
        found += _quantiles_on_device(sample.to(torch.float64), _numbers(levels, vector.device))
    if bins:
        found += _histogram_on_device(vector.to(torch.float64), bins)
    return torch.cat(found)


def _quantiles_on_device(x: Tensor, levels: Tensor) -> list[Tensor]:
    finite = x.isfinite()
    n = finite.sum(dtype=torch.float64)
    if not len(x):
        return [n[None], torch.full_like(levels, math.nan)]
    x = torch.where(finite, x, math.inf).sort().values
    at = levels * (n - 1.0).clamp(min=0.0)
    below = at.floor()
    low = x[below.long()]
    high = x[torch.minimum(below + 1.0, (n - 1.0).clamp(min=0.0)).long()]
    share = at - below
    between = torch.maximum(torch.minimum(low * (1.0 - share) + high * share, high), low)
    return [n[None], torch.where(n > 0, between, math.nan)]


def _histogram_on_device(x: Tensor, bins: int) -> list[Tensor]:
    counts = x.new_zeros(bins + 1)
    if not len(x):
        return [x.new_full((2,), math.nan), counts[:bins]]
    finite = x.isfinite()
    any_finite = finite.any()
    low = torch.where(finite, x, math.inf).amin()
    high = torch.where(finite, x, -math.inf).amax()
    width = high - low
    one = torch.ones_like(width)
    unit = torch.where(width.isfinite(), torch.where((width > 0) & (width < NARROW), WIDER * one, one), 0.5 * one)
    scale = torch.where(high > low, bins / (high * unit - low * unit), 0.0)
    at = (torch.where(finite, x * unit - low * unit, 0.0) * scale).long().clamp(0, bins - 1)
    counts.scatter_add_(0, torch.where(finite, at, bins), torch.ones_like(x))
    return [torch.where(any_finite, torch.stack([low, high]), math.nan), counts[:bins]]


@lru_cache(maxsize=128)
def _places(numel: int, device: torch.device) -> Tensor:
    """`SAMPLE` places in a vector: one in each of as many stretches, now here and now there, so that no channel is missed."""
    stretch = torch.arange(SAMPLE, dtype=torch.float64, device=device)
    at = (stretch + (stretch * GOLDEN) % 1.0) * (numel / SAMPLE)
    return at.long().clamp(max=numel - 1)


@lru_cache(maxsize=128)
def _numbers(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    there = torch.tensor(numbers, dtype=torch.float64, pin_memory=device.type == "cuda")
    return there.to(device, non_blocking=True)
