"""Relative differences of the statistics of matched tensors.

The difference of a statistic is divided by the size of the tensor, so that a mean near zero is not a special case. Let
rms be the root mean square of a tensor, and d = rms(a - b) / rms(a) the relative difference of two tensors. Then

    |mean(a) - mean(b)|, |std(a) - std(b)|, |rms(a) - rms(b)| <= rms(a - b)

by the Cauchy-Schwarz and the triangle inequality. So each of these differences, divided by the rms, is a lower bound of
d: if it exceeds a tolerance, the tensors differ by more than that. Extremes, l1 and ratios have no such bound, and
fractions jump if a single element is rounded across zero. These statistics do not decide whether tensors differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from ..tables.statistics import COUNTS, REMAINDERS, statistic_of

BOUNDS = ("mean", "std", "rms", "l2")
"""The statistics whose relative difference is a lower bound of that of the tensors."""
_FRACTIONS = ("fraction", "units")


def relative_differences(
    rows: pd.DataFrame, names: Sequence[str], floors: pd.Series | None, floor: float
) -> pd.DataFrame:
    """Return the relative difference of each statistic.

    It is |a - b| / max(size(a), size(b)). The size is the rms for `mean` and `std`, `abs_max` for `min` and `max`, and
    the statistic itself for the others. For fractions, it is |a - b|. It is infinite for fingerprints that differ.

    Args:
        floors: The number of the group of each row; -1 for no group. None if no row has a group.
        floor: The lower limit of the size of a row in a group, relative to the largest size of the group.

    Returns:
        One column per statistic; NaN if one of the runs has no value.
    """
    differences = {}
    for name in names:
        if statistic_of(name).unit == "bits":
            is_other = (rows[f"{name}_a"] != rows[f"{name}_b"]).astype("boolean")
            differences[name] = is_other.map({True: np.inf, False: 0.0}).to_numpy(np.float64, na_value=np.nan)
            continue
        a, b = (_values(rows, name, side) for side in "ab")
        gap = np.subtract(a, b, where=a != b, out=np.zeros(len(rows)))
        if f"{REMAINDERS.get(name)}_a" in rows:  # 64-bit integers, which float64 rounds
            gap += np.subtract(*(np.nan_to_num(_values(rows, REMAINDERS[name], side)) for side in "ab"))
        gap = np.abs(gap)
        if statistic_of(name).unit in _FRACTIONS:
            differences[name] = gap
            continue
        size = np.fmax(_sizes(rows, names, name, "a"), _sizes(rows, names, name, "b"))
        if floors is not None:
            largest = pd.Series(size, rows.index).groupby(floors).transform("max").to_numpy()
            size = np.where(floors >= 0, np.fmax(size, floor * largest), size)
        with np.errstate(divide="ignore", invalid="ignore"):
            differences[name] = np.where(gap == 0.0, 0.0, np.where(np.isinf(gap), np.inf, gap / size))
    return pd.DataFrame(differences, index=rows.index)


def is_of_values(name: str) -> bool:
    """Return whether a statistic can decide whether the values of two tensors differ: it is not a count and not a fraction."""
    return name not in COUNTS and statistic_of(name).unit not in _FRACTIONS


def decisive(differences: pd.DataFrame, *, all_decide: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return the decisive difference of each row, and its statistic.

    It is the largest difference of the statistics in `BOUNDS` and of the counts. For rows without these statistics, it is the
    largest difference of all statistics except fractions; with `all_decide`, of all statistics.

    Returns:
        The differences, float64, shape [rows], 0 for rows without any value; and the indices of their columns.
    """
    names = [str(name) for name in differences]
    values = differences.to_numpy(np.float64)
    is_bound = np.array([name in BOUNDS for name in names])
    is_count = np.array([name in COUNTS for name in names])
    is_other = np.array([statistic_of(name).unit not in _FRACTIONS for name in names])
    has_bounds = ~np.isnan(values[:, is_bound]).all(axis=1, keepdims=True)
    counted = (np.where(has_bounds, is_bound | is_count, is_other) | all_decide) & ~np.isnan(values)
    deciding = np.where(counted, values, -1.0)
    largest = deciding.argmax(axis=1)
    return np.maximum(deciding[np.arange(len(values)), largest], 0.0), largest


def _values(rows: pd.DataFrame, name: str, side: str) -> np.ndarray:
    return rows[f"{name}_{side}"].to_numpy(np.float64, na_value=np.nan)


def _sizes(rows: pd.DataFrame, names: Sequence[str], name: str, side: str) -> np.ndarray:
    """Return the size to which a statistic of each tensor is compared. `abs_max` replaces a missing rms."""
    own: np.ndarray = np.abs(_values(rows, name, side))
    sizes = []
    if name in ("mean", "std"):
        sizes = [_values(rows, "rms", side)] if "rms" in names else []
        sizes += (
            [np.hypot(_values(rows, "mean", side), _values(rows, "std", side))] if {"mean", "std"} <= {*names} else []
        )
    if name in ("mean", "std", "min", "max") and "abs_max" in names:
        sizes.append(_values(rows, "abs_max", side))
    for size in sizes[::-1]:
        own = np.where(np.isnan(size), own, size)
    return own
