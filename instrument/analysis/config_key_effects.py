"""Effect of one configuration key: differences between paired runs, with confidence intervals."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import numpy as np
import pandas as pd

from ..errors import InstrumentError, InstrumentWarning, Problem
from ..fields.pip_extras import packages_of
from .means_over_steps import LOCATION_COLUMNS, MEASURED_TABLES, Steps, averaged_columns, keys_of, means_of
from .run_matching import RunMatch, match_runs
from .run_tables import RunTables

MAX_REASONS = 3  # maximum number of reasons in the warning about unpaired runs


def effects_of(
    run: RunTables, key: str, *, baseline: Any, by: str | Sequence[str], steps: Steps, confidence: float
) -> pd.DataFrame:
    """Estimate the effect of a key; see `Run.effects_of`."""
    if not 0.0 < confidence < 1.0:
        raise InstrumentError(Problem("confidence", "must be between 0 and 1", confidence))
    _check_steps(steps)
    others = [by] if isinstance(by, str) else list(by)
    run_matches = match_runs(run, key, baseline, others)
    if run_matches.left_out:
        counts = Counter(run_matches.left_out.values())
        reasons = "; ".join(f"{reason} ({count})" for reason, count in list(counts.items())[:MAX_REASONS])
        reasons += "; ..." * (len(counts) > MAX_REASONS)
        message = f"{len(run_matches.left_out)} of {len(run.folders)} runs are not in any pair: {reasons}"
        warnings.warn(f"{message}. attrs['left_out'] lists all of them", InstrumentWarning, stacklevel=3)
    comparisons: dict[str, list[RunMatch]] = {}
    for match in run_matches.matches:
        comparisons.setdefault(match.comparison, []).append(match)
    tables = [_numbers_of(run, table, run_matches.matches, steps) for table in MEASURED_TABLES]
    parts = [(pairs[0], table.differences(pairs, confidence)) for pairs in comparisons.values() for table in tables]
    frame = pd.concat([part for _, part in parts], ignore_index=True)
    rows = [match for match, part in parts for _ in range(len(part))]
    frame.insert(0, "value", _cells([match.value for match in rows]))
    frame.insert(1, "baseline", _cells([run_matches.baseline] * len(rows)))
    for i, name in enumerate(others):
        frame.insert(2 + i, name, _cells([match.by[i] for match in rows]))
    p_adjusted = adjusted(frame["p_value"].to_numpy())
    after = list(frame.columns).index("p_value") + 1
    frame.insert(after, "p_adjusted", p_adjusted)
    frame.insert(after + 1, "survives", p_adjusted < 1 - confidence)
    frame.attrs = {
        "intervals": int(frame["ci_low"].notna().sum()),
        "pairs": [(one.value, run.names[one.index], run.names[one.baseline]) for one in run_matches.matches],
        "left_out": {run.names[index]: reason for index, reason in run_matches.left_out.items()},
    }
    return frame


def _check_steps(steps: Any) -> None:
    is_pair = isinstance(steps, tuple | list) and len(steps) == 2
    if is_pair and all(step is None or (isinstance(step, Integral) and int(step) >= 0) for step in steps):
        start, stop = steps
        if stop is None or (start or 0) < stop:
            return
    allowed = "(start, stop), half-open, such as (50, None)"
    raise InstrumentError(Problem("steps", "the range contains no steps", steps, allowed))


def _cells(values: list[Any]) -> pd.Series:
    """Return a column in which numbers stay numbers and None stays None."""
    return pd.Series(values, dtype=object if None in values else None)


@dataclass(frozen=True)
class _Numbers:
    """The numbers of all compared runs: float64 [runs, locations, columns]. `row_of`: the index of a run, by that in the sweep."""

    table: str
    columns: Sequence[str]
    locations: Sequence[tuple[str, ...]]
    values: np.ndarray
    has_value: np.ndarray
    row_of: Mapping[int, int]

    def differences(self, pairs: Sequence[RunMatch], confidence: float) -> pd.DataFrame:
        """Return one row per location and statistic that occurs in any pair of a comparison."""
        without = [self.row_of[pair.baseline] for pair in pairs]
        treated = [self.row_of[pair.index] for pair in pairs]
        has_before, has_after = self.has_value[without], self.has_value[treated]
        before, after = self.values[without], self.values[treated]
        with np.errstate(invalid="ignore", over="ignore"):
            numbers = np.stack([before, after, after - before], axis=1)  # [pairs, 3, locations, columns]
        both = has_before & has_after
        used = both & np.isfinite(numbers[:, 2])
        counts = {"pairs": used, "not_finite": both & ~used, "one_sided": has_before ^ has_after}
        totals = {name: mask.sum(0) for name, mask in counts.items()}
        rows, columns = np.nonzero(totals["pairs"] + totals["not_finite"])
        labels = pd.DataFrame(list(self.locations), columns=keys_of(self.table), dtype=object)
        where = labels.reindex(columns=list(LOCATION_COLUMNS)).iloc[rows].reset_index(drop=True)
        where.insert(0, "table", self.table)
        seeds = np.array([pair.seed for pair in pairs])
        numbers = np.where(used[:, None], numbers, np.nan)
        of_seeds = np.stack([_mean(numbers[seeds == seed]) for seed in dict.fromkeys(seeds.tolist())])
        arrays = {**_intervals(of_seeds, confidence), **totals}
        statistics = np.array(self.columns, dtype=object)[columns]
        return where.assign(statistic=statistics, **{name: cells[rows, columns] for name, cells in arrays.items()})


def _numbers_of(run: RunTables, table: str, matches: Sequence[RunMatch], steps: Steps) -> _Numbers:
    indices = list(dict.fromkeys(index for match in matches for index in (match.baseline, match.index)))
    means = [means_of(run.single(index), table, steps) for index in indices]
    columns = list(averaged_columns(run, table))
    locations = list(dict.fromkeys(location for each in means for location in each.locations))
    row_of_location = {location: row for row, location in enumerate(locations)}
    values = np.zeros((len(means), len(locations), len(columns)))
    has_value = np.zeros(values.shape, dtype=bool)
    for index, each in enumerate(means):
        rows = [row_of_location[location] for location in each.locations]
        cells = np.ix_(rows, [columns.index(name) for name in each.columns])
        values[index][cells], has_value[index][cells] = each.values, each.counts > 0
    return _Numbers(table, columns, locations, values, has_value, {index: row for row, index in enumerate(indices)})


def _intervals(seeds: np.ndarray, confidence: float) -> dict[str, np.ndarray]:
    """Return the numeric columns of the result from one number per seed, [seeds, 3, locations, columns]."""
    before, after, difference = _mean(seeds)
    seed_counts = (~np.isnan(seeds[:, 2])).sum(0)
    with np.errstate(invalid="ignore", over="ignore"):  # an overflow results in a missing interval
        squares = np.nansum((seeds[:, 2] - difference) ** 2, axis=0)
        width, p_value = student(difference, squares, seed_counts, confidence)
        low, high = (np.where(np.isfinite(end), end, np.nan) for end in (difference - width, difference + width))
    return {
        "n": seed_counts,
        "mean_baseline": before,
        "mean_value": after,
        "difference": difference,
        "ci_low": low,
        "ci_high": high,
        "confidence": np.full(low.shape, confidence),
        "p_value": p_value,
    }


def _mean(numbers: np.ndarray) -> np.ndarray:
    """Return the mean over the first dimension without NaN. Equal numbers give this number, and sums do not overflow."""
    half = numbers / 2
    lowest = np.fmin.reduce(half)
    counts = np.maximum((~np.isnan(half)).sum(0), 1)
    mean: np.ndarray = 2 * (lowest + np.nansum((half - lowest) / counts, axis=0))
    return mean


CONFIDENCE = 0.95  # the usual confidence level


def student(
    means: np.ndarray, squares: np.ndarray, counts: np.ndarray, confidence: float = CONFIDENCE
) -> tuple[np.ndarray, np.ndarray]:
    """Return half the width of Student's confidence interval of a mean, and the two-sided p-value of the test that it is zero.

    The half width is t((1 + confidence) / 2, n - 1) * s / sqrt(n). The p-value is below 1 - confidence where the interval does
    not contain zero.

    Args:
        means: The means; any shape.
        squares: Sum of the squared distances of the numbers to their mean, (n - 1) s^2; same shape.
        counts: How many numbers there are, n; same shape.

    Returns:
        Both in the same shape; NaN for fewer than two numbers.
    """
    with packages_of("analysis", "a confidence interval"):
        from scipy.special import stdtr, stdtrit

    freedom = np.maximum(counts - 1, 1)
    error = np.sqrt(squares / freedom / np.maximum(counts, 1))
    known = (counts > 1) & np.isfinite(error)
    with np.errstate(divide="ignore", invalid="ignore"):  # equal numbers have no error
        t = np.where(means == 0, 0.0, np.abs(means) / error)
        width = stdtrit(freedom, (1 + confidence) / 2) * error
    return np.where(known, width, np.nan), np.where(known & np.isfinite(means), 2 * stdtr(freedom, -t), np.nan)


def adjusted(p_values: np.ndarray) -> np.ndarray:
    """Adjust p-values for their number, so that a limit on them bounds the false discovery rate.

    The method is that of Y. Benjamini and Y. Hochberg, Journal of the Royal Statistical Society B 57 (1995), 289-300, from
    `scipy.stats.false_discovery_control`.

    Returns:
        The adjusted p-values [tests]; NaN for no test.
    """
    with packages_of("analysis", "the adjustment of p-values"):
        from scipy.stats import false_discovery_control

    result = np.full(p_values.shape, np.nan)
    known = ~np.isnan(p_values)
    if known.any():
        result[known] = false_discovery_control(p_values[known])
    return result
