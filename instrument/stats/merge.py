"""Quantiles, histograms and dead units of a distributed tensor, from those of its parts in several processes.

Quantiles are computed from sketches: `LEVELS` equally spaced quantiles of each part. The elements of a part are assumed
to be evenly distributed between its quantiles. The rank error is therefore at most 1 / (LEVELS - 1) = 0.4%, in addition
to that of the sample of the part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .distribution import distribution
from .measure import measure, sums_on_device
from .sums import INDEX

LEVELS = 257
MAX_GATHERED = 2**23  # numbers that rank 0 gathers to save a collective operation: 64 MiB
PACKED = 48  # units per number: a float64 represents integers up to 2^53 exactly

_SKETCHED = tuple(i / (LEVELS - 1) for i in range(LEVELS))

Array = np.ndarray[Any, np.dtype[np.float64]]


def sketch(tensor: Tensor, quantiles: bool, bins: int) -> Tensor:
    """Compute the distribution of one part, for `merge_distributions`: float64 [numbers] on the device of the tensor."""
    measured = measure(tensor)
    sums = torch.from_numpy(measured.row[None]) if measured.on_device is None else sums_on_device([measured])
    numbers = distribution(tensor, _SKETCHED if quantiles else (), bins)
    if not isinstance(numbers, Tensor):
        numbers = torch.tensor([math.nan if value is None else value for value in numbers], dtype=torch.float64)
    return torch.cat([sums[0, INDEX["n"]][None], numbers])


def pack_units(dead: Tensor) -> Tensor:
    """Pack a mask of dead units, bool [units], 48 units per number: float64 [ceil(units / 48)], integers below 2^48."""
    padded = torch.zeros(-(-len(dead) // PACKED) * PACKED, dtype=torch.float64, device=dead.device)
    padded[: len(dead)] = dead.to(torch.float64)
    powers = torch.exp2(torch.arange(PACKED, dtype=torch.float64, device=dead.device))
    return padded.view(-1, PACKED) @ powers


def merge_units(packed: Array) -> int:
    """Return the number of units that are dead in all parts: `pack_units` of each, [parts, numbers]; NaN for missing parts."""
    dead = np.bitwise_and.reduce(packed[~np.isnan(packed).any(axis=1)].astype(np.int64), axis=0)
    return sum(int(number).bit_count() for number in dead)


def merge_distributions(
    parts: Array, levels: Sequence[float], bins: int
) -> tuple[int, list[float] | None, float | None, float | None, list[int] | None]:
    """Merge the distributions of all parts.

    Args:
        parts: float64 [parts, numbers]: the number of finite elements; if quantiles are requested, the number of
            elements used for them and `LEVELS` quantiles; if a histogram is requested, the minimum, the maximum and the
            counts. NaN for missing numbers.
        levels: The levels of the requested quantiles, from 0 to 1; empty for no quantiles.
        bins: The number of bins; 0 for no histogram.

    Returns:
        The number of elements used for the quantiles, the quantiles, the minimum, the maximum and the counts. The
        counts of a part are assumed to be evenly distributed within its bins. If the ranges of the parts differ, some
        counts near the edges of a bin may be in the adjacent bin.
    """
    parts = parts[parts[:, 0] > 0]
    sampled, quantiles, low, high, counts = 0, None, None, None, None
    if levels and len(parts):
        sampled = int(parts[:, 1].sum())
        quantiles = _quantiles(parts[:, 2 : 2 + LEVELS], parts[:, 0], levels)
    if bins:
        counts = [0] * bins
        if len(parts):
            lows, highs, counted = parts[:, -bins - 2], parts[:, -bins - 1], parts[:, -bins:]
            low, high = float(lows.min()), float(highs.max())
            counts = _histogram(lows, highs, counted, low, high)
    return sampled, quantiles, low, high, counts


def _quantiles(sketches: Array, sizes: Array, levels: Sequence[float]) -> list[float]:
    """Return quantiles of all parts, whose elements are assumed to be evenly distributed between their quantiles."""
    weight_per_point = np.ones(sketches.shape[1])
    weight_per_point[[0, -1]] = 0.5
    weights = (sizes[:, None] * weight_per_point).ravel()
    order = np.argsort(sketches, axis=None, kind="stable")
    values, weights = sketches.ravel()[order], weights[order]
    ranks = np.cumsum(weights) - weights / 2.0
    quantiles: list[float] = np.interp(np.asarray(levels) * weights.sum(), ranks, values).tolist()
    return quantiles


def _histogram(lows: Array, highs: Array, counted: Array, low: float, high: float) -> list[int]:
    bins = counted.shape[1]
    edges = np.linspace(low, high, bins + 1)
    total = np.zeros(bins)
    for part_low, part_high, counts in zip(lows, highs, counted, strict=True):
        if part_high > part_low:
            part_edges = np.linspace(part_low, part_high, bins + 1)
            below = np.interp(edges, part_edges, np.concatenate([[0.0], np.cumsum(counts)]))
            total += np.diff(below)
        else:
            index = int((part_low - low) / (high - low) * bins) if high > low else 0
            total[min(index, bins - 1)] += counts.sum()
    return _round_to_total(total, int(counted.sum()))


def _round_to_total(exact_counts: Array, total: int) -> list[int]:
    """Round to integers with a given total (largest remainders)."""
    floors = np.floor(exact_counts)
    missing = total - int(floors.sum())
    for index in np.argsort(floors - exact_counts, kind="stable")[:missing]:
        floors[index] += 1
    return [int(number) for number in floors]
