"""Sums of a CPU tensor by PyTorch operations in float64, for tensors that the compiled kernel does not support."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..spec.statistics import Sum
from .sums import BASE

SAFE_EXPONENT = (
    200  # powers of two up to it neither overflow nor underflow float64 if they are raised to the fourth power
)
MAX_EXPONENT = 1000  # a power of two; the unit and its inverse are then finite

Row = np.ndarray[Any, np.dtype[np.float64]]


def portable_sums(flat: Tensor) -> Row:
    """Return the sums `BASE` of a tensor, float64 [columns], with NaN for the magnitudes.

    Args:
        flat: Any real dtype, shape [elements].
    """
    finite = finite_elements(flat)
    row = np.full(len(BASE), np.nan)
    nan_count = int(flat.isnan().sum()) if len(finite) < len(flat) else 0
    row[:4] = len(flat), len(finite), nan_count, len(finite) - int(torch.count_nonzero(finite))
    if len(finite):
        low, high = (bound.item() for bound in torch.aminmax(finite))
        unit = _unit(max(-low, high))
        mean, deviations = low / unit, 0.0
        if low < high:
            y = finite / unit
            # Relative to an element, so that a spread in the last bits of a large mean is exact.
            moved = y - mean
            distance = moved.mean()
            moved -= distance
            rest = moved.sum()  # the rounding error of the mean
            mean += distance.item() + rest.item() / len(y)
            deviations = max((torch.dot(moved, moved) - rest * rest / len(y)).item(), 0.0)
        row[4:8] = low, high, mean, deviations
        row[-1] = unit
    return row


def further_sums(flat: Tensor, row: Row, sums: Sequence[Sum]) -> list[float]:
    """Return sums that the other ways of measuring do not form.

    Args:
        flat: Any real dtype, shape [elements].
        row: The sums `BASE` of the tensor.
        sums: Sums with a term.
    """
    base = dict(zip(BASE, row.tolist(), strict=False))
    if not base["n"]:
        return [math.nan for _ in sums]
    return [float(term.sum(dtype=torch.float64)) for term in terms_of(finite_elements(flat), base, sums)]


def terms_of(x: Tensor, base: Mapping[str, Any], sums: Sequence[Sum]) -> Iterator[Tensor]:
    """Yield the summands of sums for each element.

    Args:
        x: float64 [elements]. Those that are not finite are infinite or NaN.
        base: The sums `BASE`: numbers, or scalars on the device of x.
        sums: Sums with a term.
    """
    y, mean = x / base["unit"], base["mean"]
    # A small spread is exact, unlike its mean.
    moved = (y - mean).nan_to_num(0.0, 0.0, 0.0)
    rest = moved.sum() / base["n"]
    for each in sums:
        assert each.term is not None, "only sums with a term are measured here"
        if each.is_central:
            yield each.term(moved, rest)
        else:
            yield each.term(y, mean) if each.power else each.term(x, mean * base["unit"])


def finite_elements(flat: Tensor) -> Tensor:
    """Return the finite elements in float64."""
    wide = flat.to(torch.float64)
    is_finite = wide.isfinite()
    return wide if is_finite.all() else wide[is_finite]


def _unit(largest: float) -> float:
    """Return a power of two, so that powers neither overflow nor underflow; 1 if no other unit is required."""
    exponent = math.frexp(largest)[1] if largest else 0
    return 1.0 if abs(exponent) <= SAFE_EXPONENT else 2.0 ** max(-MAX_EXPONENT, min(exponent, MAX_EXPONENT))
