"""Statistics of one tensor from those of its parts, which several processes have measured.

Each process brings a row of numbers for each tensor. They are combined by a maximum and a sum, which is what processes can
form together without any of them seeing the others' rows: first the extremes, then sums of values over the largest magnitude
(so that no square overflows), and of their squares about the middle between the extremes. No element is further from the mean
than sqrt(n - 1) standard deviations (Samuelson 1968, "How deviant can you be?"), so that the variance, from which the square of
the middle's distance is taken, is off by at most some n * 1e-16 of itself: 1e-6 for a tensor of 1e10 elements.

Quantiles come from sketches: `LEVELS` quantiles of each part, at equal distances. The distribution of all is taken to have each
part's elements spread evenly between its quantiles, so that a rank is off by at most 1 / (LEVELS - 1) = 0.4%, beside what a
part's own sample is off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..spec.statistics import ALL
from .distribution import distribution
from .kernel import Values, measure

MEASURED = ("numel", "mean", "std", "min", "max", "l2", "zero_fraction", "nan_count", "inf_count")
"""What is measured of each part; `l1` beside it where it is asked for."""
PART = (*MEASURED, "l1", "saturated", "weight", "dead", "units")
"""The numbers of one part: those, the share of saturated elements, the norm of the parameter that an update belongs to, and how
many units are dead of how many, where no two parts have the same ones."""
MERGED = ALL
"""What becomes of the parts' numbers. Of units that all parts have, which ones are dead is gathered."""
LEVELS = 257
PACKED = 48  # units in a number: a float64 holds integers up to 2^53

_SKETCHED = tuple(i / (LEVELS - 1) for i in range(LEVELS))

Array = np.ndarray[Any, np.dtype[np.float64]]
Part = Sequence[float] | Tensor
"""The numbers of one part, in the order of PART; a float64 tensor where they are on a device."""


def part_of(
    values: Values, saturated: float | Tensor | None, weight: float | Tensor | None, dead: Tensor | None = None
) -> Part:
    """The numbers of one part.

    Args:
        values: Of MEASURED, and `l1` where it is asked for, as `instrument.stats.kernel.measure` gives them.
        saturated: The share of saturated elements; None where that has no meaning or is not asked for.
        weight: The norm of the parameter that an update belongs to; None likewise.
        dead: Which units are dead, bool [units], where these are in no other part; None likewise.

    Returns:
        As many numbers as PART has, NaN where there is none; a float64 tensor where the values are on a device.
    """
    if not isinstance(values, Tensor):
        units = (None, None) if dead is None else (int(dead.sum()), len(dead))
        numbers = [*values, *[None] * (len(PART) - 4 - len(values)), saturated, weight, *units]
        return [math.nan if number is None else float(number) for number in numbers]
    part = values.new_full((len(PART),), math.nan)
    part[: len(values)] = values
    counts = (None, None) if dead is None else (dead.sum(), len(dead))
    for place, number in zip((-4, -3, -2, -1), (saturated, weight, *counts), strict=True):
        if number is not None:
            part[place] = number
    return part


def sketch(tensor: Tensor, quantiles: bool, bins: int) -> Tensor:
    """The distribution of one part, for `merge_distributions`.

    Args:
        tensor: Any shape, layout, dtype and device.
        quantiles: Whether quantiles are asked for.
        bins: Of the histogram; 0 for none.

    Returns:
        float64 [numbers] on the tensor's device.
    """
    counts = measure(tensor, ("numel", "nan_count", "inf_count"))
    found = distribution(tensor, _SKETCHED if quantiles else (), bins)
    counted, numbers = (part if isinstance(part, Tensor) else _numbers(part) for part in (counts, found))
    return torch.cat([(counted[0] - counted[1] - counted[2])[None], numbers])


def _numbers(values: Sequence[float | None]) -> Tensor:
    return torch.tensor([math.nan if value is None else value for value in values], dtype=torch.float64)


def extremes(parts: Tensor) -> Tensor:
    """What to form the maximum of.

    Args:
        parts: float64 [rows, PART], NaN where there is no number.

    Returns:
        float64 [rows, 5]: max, -min, weight, saturated, l1; minus infinity where there is none.
    """
    of = _columns(parts)
    found = torch.stack([of["max"], -of["min"], of["weight"], of["saturated"], of["l1"]], dim=1)
    return found.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf)


def sums(parts: Tensor, most: Tensor) -> Tensor:
    """What to form the sum of, once the extremes of all parts are known.

    Args:
        parts: float64 [rows, PART].
        most: float64 [rows, 5], the maximum of all parts' `extremes`.

    Returns:
        float64 [rows, 13]: numel, finite, sum, sum of squares, sum of magnitudes, zeros, NaN, infinite and saturated elements,
        with values over the largest magnitude; the square of the parameter's norm over the largest; squares about the
        middle; dead units, units.
    """
    of, unit, weight = _columns(parts), _unit(most), _norm_unit(most)
    n = _finite(of)
    found = [
        *(of["numel"], n, n * (of["mean"] / unit), (of["l2"] / unit).square(), of["l1"] / unit),
        *(n * of["zero_fraction"], of["nan_count"], of["inf_count"], n * of["saturated"]),
        (of["weight"] / weight).square(),
        n * ((of["std"] / unit).square() + (of["mean"] / unit - _middle(most)).square()),
        of["dead"],
        of["units"],
    ]
    return torch.stack(found, dim=1).nan_to_num(nan=0.0)


def merged(most: Tensor, total: Tensor) -> Tensor:
    """The statistics of all parts together, float64 [rows, MERGED]; NaN where there is no value."""
    unit = _unit(most)
    numel, n, summed, squared, magnitudes, zeros, nans, infinities, saturated, weights, squares, dead, units = (
        total.unbind(dim=1)
    )
    none = torch.where(n > 0, 0.0, math.nan)
    high, low = most[:, 0] + none, -most[:, 1] + none
    l2 = squared.sqrt() * unit + none
    weight = weights.sqrt() * _norm_unit(most)
    found = {
        "numel": numel,
        "mean": summed / n * unit,
        "std": (squares / n - (summed / n - _middle(most)).square()).clamp(min=0.0).sqrt() * unit,
        "rms": (squared / n).sqrt() * unit,
        "min": low,
        "max": high,
        "abs_max": torch.maximum(high.abs(), low.abs()),
        "l1": magnitudes * unit + torch.where(most[:, 4].isinf(), math.nan, none),
        "l2": l2,
        "zero_fraction": zeros / n,
        "nan_count": nans,
        "inf_count": infinities,
        "dead_fraction": torch.where(units > 0, dead / units, math.nan),
        "saturated_fraction": saturated / n + torch.where(most[:, 3].isinf(), math.nan, 0.0),
        "update_ratio": torch.where(weight > 0, l2 / weight, math.nan),
    }
    return torch.stack([found[name] for name in MERGED], dim=1)


def _columns(parts: Tensor) -> dict[str, Tensor]:
    return dict(zip(PART, parts.unbind(dim=1), strict=True))


def _finite(of: dict[str, Tensor]) -> Tensor:
    return of["numel"] - of["nan_count"] - of["inf_count"]


def _unit(most: Tensor) -> Tensor:
    """The largest magnitude of each row, 1 where that is no number to divide by."""
    largest = most[:, :2].abs().amax(dim=1)
    return torch.where((largest > 0) & largest.isfinite(), largest, 1.0)


def _middle(most: Tensor) -> Tensor:
    """The middle between the smallest and the largest value, over the unit; 0 where there is none."""
    unit = _unit(most)
    middle = most[:, 0] / unit / 2.0 - most[:, 1] / unit / 2.0
    return torch.where(middle.isfinite(), middle, 0.0)


def _norm_unit(most: Tensor) -> Tensor:
    weight = most[:, 2]
    return torch.where((weight > 0) & weight.isfinite(), weight, 1.0)


def pack_units(dead: Tensor) -> Tensor:
    """Which units are dead, 48 to a number.

    Args:
        dead: bool [units].

    Returns:
        float64 [ceil(units / 48)], each a whole number below 2^48.
    """
    padded = torch.zeros(-(-len(dead) // PACKED) * PACKED, dtype=torch.float64, device=dead.device)
    padded[: len(dead)] = dead.to(torch.float64)
    places = torch.exp2(torch.arange(PACKED, dtype=torch.float64, device=dead.device))
    return padded.view(-1, PACKED) @ places


def merge_units(packed: Array, units: int) -> float:
    """The share of units that are dead in all parts.

    Args:
        packed: float64 [parts, numbers], as `pack_units` gives them.
        units: How many there are.
    """
    dead = np.bitwise_and.reduce(packed.astype(np.int64), axis=0)
    return sum(int(number).bit_count() for number in dead) / units


def merge_distributions(
    parts: Array, levels: Sequence[float], bins: int
) -> tuple[int, list[float] | None, float | None, float | None, list[int] | None]:
    """A distribution from those of its parts.

    Args:
        parts: float64 [parts, numbers]: finite elements; how many the quantiles are of, and LEVELS quantiles, where quantiles
            are asked for; the smallest and the largest element and the counts, where a histogram is. NaN is no number.
        levels: Of the quantiles that are asked for, from 0 to 1; none for no quantiles.
        bins: Of the histogram; 0 for none.

    Returns:
        How many elements the quantiles are of, the quantiles, the smallest and the largest element and the counts. A part's
        counts are spread evenly over its own bins: where the parts' ranges differ, a count is off by some of what lies in the
        bins at its edges.
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
    """Quantiles of all parts, each of which has its elements spread evenly between those of its sketch."""
    each = np.ones(sketches.shape[1])
    each[[0, -1]] = 0.5
    weights = (sizes[:, None] * each).ravel()
    order = np.argsort(sketches, axis=None, kind="stable")
    values, weights = sketches.ravel()[order], weights[order]
    ranks = np.cumsum(weights) - weights / 2.0
    found: list[float] = np.interp(np.asarray(levels) * weights.sum(), ranks, values).tolist()
    return found


def _histogram(lows: Array, highs: Array, counted: Array, low: float, high: float) -> list[int]:
    bins = counted.shape[1]
    edges = np.linspace(low, high, bins + 1)
    total = np.zeros(bins)
    for least, most, counts in zip(lows, highs, counted, strict=True):
        if most > least:
            below = np.interp(edges, np.linspace(least, most, bins + 1), np.concatenate([[0.0], np.cumsum(counts)]))
            total += np.diff(below)
        else:
            at = int((least - low) / (high - low) * bins) if high > low else 0
            total[min(at, bins - 1)] += counts.sum()
    return _whole_numbers(total, int(counted.sum()))


def _whole_numbers(shares: Array, total: int) -> list[int]:
    """Whole numbers of this total that are nearest to the shares (largest remainders)."""
    floors = np.floor(shares)
    missing = total - int(floors.sum())
    for place in np.argsort(floors - shares, kind="stable")[:missing]:
        floors[place] += 1
    return [int(number) for number in floors]
