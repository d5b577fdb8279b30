"""Statistics of a distributed tensor, computed from the statistics of its parts in several processes.

Each process contributes one row of numbers per tensor. The rows are combined by one maximum and one sum over all
processes. The maximum gives the extremes. The sum then adds values divided by the largest magnitude, so that no square
overflows, and squares about the midpoint of the extremes. No element is further from the mean than sqrt(n - 1) standard
deviations (Samuelson 1968, "How deviant can you be?"). The relative error of the variance, from which the squared
distance of the midpoint is subtracted, is therefore at most about n * 1e-16: 1e-6 for a tensor of 1e10 elements.

Quantiles are computed from sketches: `LEVELS` equally spaced quantiles of each part. The elements of a part are assumed
to be evenly distributed between its quantiles. The rank error is therefore at most 1 / (LEVELS - 1) = 0.4%, in addition
to that of the sample of the part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from .device_numbers import DeviceNumbers
from .distribution import distribution
from .formulas import FORMULAS, Sums
from .measure import MEASURED, Values, measure

PARTIAL_STATISTICS = (*MEASURED, "l1", "saturated", "weight", "dead", "units")
"""The numbers of one part.

`MEASURED` and `l1`; the fraction of saturated elements; the norm of the parameter of an update; the number of dead
units and of all units, if no two parts have the same units.
"""
MERGED = (*FORMULAS, "dead_fraction", "saturated_fraction", "update_ratio")
"""The statistics of all parts together. For units that all parts have, the dead units of each part are gathered."""
LEVELS = 257
PACKED = 48  # units per number: a float64 represents integers up to 2^53 exactly

_SKETCHED = tuple(i / (LEVELS - 1) for i in range(LEVELS))

Array = np.ndarray[Any, np.dtype[np.float64]]
PartialStatistics = Sequence[float] | Tensor
"""The numbers of one part, in the order of `PARTIAL_STATISTICS`; a float64 tensor if they are on a device."""


def partial_statistics(
    values: Values,
    saturated: float | DeviceNumbers | None,
    weight: float | DeviceNumbers | None,
    dead: Tensor | None = None,
) -> PartialStatistics:
    """Combine the numbers of one part.

    Args:
        values: The statistics `MEASURED`, and `l1` if requested: the result of `instrument.stats.measure.measure`.
        saturated: The fraction of saturated elements; None if not defined or not requested.
        weight: The norm of the parameter of an update; None if not defined or not requested.
        dead: Which units are dead, bool [units], if no other part has them; None otherwise.

    Returns:
        len(PARTIAL_STATISTICS) numbers, NaN for missing ones; a float64 tensor if the values are on a device.
    """
    counts = (None, None) if dead is None else (dead.sum(), len(dead))
    if not isinstance(values, DeviceNumbers):
        found = [*values, *[None] * (len(PARTIAL_STATISTICS) - 4 - len(values)), saturated, weight, *counts]
        return [math.nan if number is None else float(cast(float, number)) for number in found]
    measured = values.on_device()
    part = measured.new_full((len(PARTIAL_STATISTICS),), math.nan)
    part[: len(measured)] = measured
    for index, number in zip((-4, -3, -2, -1), (saturated, weight, *counts), strict=True):
        if number is not None:
            part[index] = number.on_device()[0] if isinstance(number, DeviceNumbers) else number
    return part


def sketch(tensor: Tensor, quantiles: bool, bins: int) -> Tensor:
    """Compute the distribution of one part, for `merge_distributions`.

    Args:
        tensor: Any shape, layout, dtype and device.
        quantiles: Whether quantiles are requested.
        bins: The number of bins; 0 for no histogram.

    Returns:
        float64 [numbers] on the device of the tensor.
    """
    counts = measure(tensor, ("numel", "nan_count", "inf_count"))
    found = distribution(tensor, _SKETCHED if quantiles else (), bins)
    counted, numbers = (
        part.on_device() if isinstance(part, DeviceNumbers) else _numbers(part) for part in (counts, found)
    )
    return torch.cat([(counted[0] - counted[1] - counted[2])[None], numbers])


def _numbers(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)


def extremes(parts: Tensor) -> Tensor:
    """Return the numbers of which the maximum over all processes is computed.

    Args:
        parts: float64 [rows, PARTIAL_STATISTICS], NaN for missing numbers.

    Returns:
        float64 [rows, 5]: max, -min, weight, saturated, l1; minus infinity for missing numbers.
    """
    columns = _columns(parts)
    found = torch.stack(
        [columns["max"], -columns["min"], columns["weight"], columns["saturated"], columns["l1"]], dim=1
    )
    return found.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)


def sums(parts: Tensor, maxima: Tensor) -> Tensor:
    """Return the numbers of which the sum over all processes is computed, given the extremes of all parts.

    Args:
        parts: float64 [rows, PARTIAL_STATISTICS].
        maxima: float64 [rows, 5], the maximum of all parts' `extremes`.

    Returns:
        float64 [rows, 13]: elements, finite elements, sum, sum of squares, sum of magnitudes, zeros, NaN, infinities,
        saturated elements, squared norm of the parameter, sum of squares about the midpoint, dead units, units. The
        sums are of values divided by the largest magnitude. The norm is divided by the largest norm.
    """
    columns, unit, weight = _columns(parts), _unit(maxima), _norm_unit(maxima)
    n = _finite(columns)
    found = [
        *(columns["numel"], n, n * (columns["mean"] / unit), (columns["l2"] / unit).square(), columns["l1"] / unit),
        *(n * columns["zero_fraction"], columns["nan_count"], columns["inf_count"], n * columns["saturated"]),
        (columns["weight"] / weight).square(),
        n * ((columns["std"] / unit).square() + (columns["mean"] / unit - _midpoint(maxima)).square()),
        columns["dead"],
        columns["units"],
    ]
    return torch.stack(found, dim=1).nan_to_num(nan=0.0)


def merged(maxima: Tensor, total: Tensor) -> Tensor:
    """Compute the statistics of all parts together, float64 [rows, MERGED]; NaN for missing values."""
    unit = _unit(maxima)
    numel, n, summed, squared, magnitudes, zeros, nans, infinities, saturated, weights, squares, dead, units = (
        total.unbind(dim=1)
    )
    nan_if_empty = torch.where(n > 0, 0.0, math.nan)
    high, low = maxima[:, 0] + nan_if_empty, -maxima[:, 1] + nan_if_empty
    weight = weights.sqrt() * _norm_unit(maxima)
    sums = Sums(
        numel=numel,
        n=n,
        nan_count=nans,
        inf_count=infinities,
        zeros=zeros,
        low=low,
        high=high,
        mean=summed / n,
        variance=(squares / n - (summed / n - _midpoint(maxima)).square()).clamp(min=0.0),
        squares=squared + nan_if_empty,
        magnitudes=magnitudes + torch.where(maxima[:, 4].isinf(), math.nan, nan_if_empty),
        unit=unit,
    )
    found = {name: formula(sums) for name, formula in FORMULAS.items()} | {
        "dead_fraction": torch.where(units > 0, dead / units, math.nan),
        "saturated_fraction": saturated / n + torch.where(maxima[:, 3].isinf(), math.nan, 0.0),
        "update_ratio": torch.where(weight > 0, FORMULAS["l2"](sums) / weight, math.nan),
    }
    return torch.stack([found[name] for name in MERGED], dim=1)


def _columns(parts: Tensor) -> dict[str, Tensor]:
    return dict(zip(PARTIAL_STATISTICS, parts.unbind(dim=1), strict=True))


def _finite(columns: dict[str, Tensor]) -> Tensor:
    return columns["numel"] - columns["nan_count"] - columns["inf_count"]


def _unit(maxima: Tensor) -> Tensor:
    """Return the largest magnitude of each row; 1 if it is zero or not finite."""
    largest = maxima[:, :2].abs().amax(dim=1)
    return torch.where((largest > 0) & largest.isfinite(), largest, 1.0)


def _midpoint(maxima: Tensor) -> Tensor:
    """Return the midpoint of minimum and maximum, divided by the unit; 0 if it is not finite."""
    unit = _unit(maxima)
    middle = maxima[:, 0] / unit / 2.0 - maxima[:, 1] / unit / 2.0
    return torch.where(middle.isfinite(), middle, 0.0)


def _norm_unit(maxima: Tensor) -> Tensor:
    weight = maxima[:, 2]
    return torch.where((weight > 0) & weight.isfinite(), weight, 1.0)


def pack_units(dead: Tensor) -> Tensor:
    """Pack a mask of dead units, 48 units per number.

    Args:
        dead: bool [units].

    Returns:
        float64 [ceil(units / 48)]: integers below 2^48.
    """
    padded = torch.zeros(-(-len(dead) // PACKED) * PACKED, dtype=torch.float64, device=dead.device)
    padded[: len(dead)] = dead.to(torch.float64)
    powers = torch.exp2(torch.arange(PACKED, dtype=torch.float64, device=dead.device))
    return padded.view(-1, PACKED) @ powers


def merge_units(packed: Array, units: int) -> float:
    """Return the fraction of units that are dead in all parts.

    Args:
        packed: float64 [parts, numbers], the results of `pack_units`.
        units: The number of units.
    """
    dead = np.bitwise_and.reduce(packed.astype(np.int64), axis=0)
    return sum(int(number).bit_count() for number in dead) / units


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
    """Compute quantiles of all parts.

    The elements of a part are assumed to be evenly distributed between its quantiles.
    """
    weight_per_point = np.ones(sketches.shape[1])
    weight_per_point[[0, -1]] = 0.5
    weights = (sizes[:, None] * weight_per_point).ravel()
    order = np.argsort(sketches, axis=None, kind="stable")
    values, weights = sketches.ravel()[order], weights[order]
    ranks = np.cumsum(weights) - weights / 2.0
    found: list[float] = np.interp(np.asarray(levels) * weights.sum(), ranks, values).tolist()
    return found


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
