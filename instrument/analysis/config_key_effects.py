"""Effect of one configuration key: differences between paired runs, with confidence intervals."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from numbers import Integral
from typing import Any

import numpy as np
import pandas as pd

from ..errors import InstrumentError, InstrumentWarning, Problem
from .confidence_interval import adjusted, student
from .means_over_steps import LOCATION_COLUMNS, MEASURED_TABLES, Means, Steps, averaged_columns, keys_of, means_of
from .run_matching import RunMatches, match_runs
from .run_tables import RunTables

MAX_REASONS = 3  # maximum number of reasons in the warning about unpaired runs


def effects_of(
    run: RunTables,
    key: str,
    *,
    baseline: Any,
    by: str | Sequence[str],
    steps: Steps,
    confidence: float,
) -> pd.DataFrame:
    """Estimate the effect of a key; see `Run.effects_of`."""
    if not 0.0 < confidence < 1.0:
        raise InstrumentError(Problem("confidence", "must be between 0 and 1", confidence))
    _check_steps(steps)
    others = [by] if isinstance(by, str) else list(by)
    run_matches = match_runs(run, key, baseline, others)
    _warn_unpaired(run, run_matches)
    differences = {table: _Differences(table, averaged_columns(run, table)) for table in MEASURED_TABLES}
    for seed in run_matches.by_seed():
        for baseline_index, matches in seed.items():
            baseline_means = _means_of_run(run, baseline_index, steps)
            for match in matches:
                means = _means_of_run(run, match.index, steps)
                for table in MEASURED_TABLES:
                    differences[table].add(match.comparison, baseline_means[table], means[table])
        for table in MEASURED_TABLES:
            differences[table].end_seed()
    comparisons = {match.comparison: match for match in run_matches.matches}
    parts = [
        (match, table.frame(name, confidence)) for name, match in comparisons.items() for table in differences.values()
    ]
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
    """Check that the range of steps is valid and not empty."""
    is_pair = isinstance(steps, tuple | list) and len(steps) == 2
    if is_pair and all(step is None or (isinstance(step, Integral) and int(step) >= 0) for step in steps):
        start, stop = steps
        if stop is None or (start or 0) < stop:
            return
    allowed = "(start, stop), half-open, such as (50, None)"
    raise InstrumentError(Problem("steps", "the range contains no steps", steps, allowed))


def _means_of_run(run: RunTables, index: int, steps: Steps) -> dict[str, Means]:
    """Return the means of one run, by table."""
    return {table: means_of(run.single(index), table, steps) for table in MEASURED_TABLES}


def _warn_unpaired(run: RunTables, run_matches: RunMatches) -> None:
    """Warn about the number of unpaired runs, with some of the reasons."""
    if not run_matches.left_out:
        return
    counts = Counter(run_matches.left_out.values())
    reasons = "; ".join(f"{reason} ({count})" for reason, count in list(counts.items())[:MAX_REASONS])
    more = "; ..." if len(counts) > MAX_REASONS else ""
    unpaired = f"{len(run_matches.left_out)} of {len(run.folders)} runs are not in any pair"
    warnings.warn(f"{unpaired}: {reasons}{more}. attrs['left_out'] lists all of them", InstrumentWarning, stacklevel=4)


def _cells(values: list[Any]) -> pd.Series:
    """Return a column in which numbers stay numbers and None stays None."""
    return pd.Series(values, dtype=object if None in values else None)


class _Differences:
    """Paired differences at all locations of one table.

    Args:
        columns: The columns of the table that are averaged in any run.
    """

    def __init__(self, table: str, columns: Sequence[str]) -> None:
        self.table = table
        self.columns = {name: index for index, name in enumerate(columns)}
        self.locations: dict[tuple[str, ...], int] = {}
        self.comparisons: dict[str, _Comparison] = {}

    def add(self, comparison: str, before: Means, after: Means) -> None:
        """Add one pair."""
        for location in (*before.locations, *after.locations):
            self.locations.setdefault(location, len(self.locations))
        added_to = self.comparisons.setdefault(comparison, _Comparison(len(self.columns)))
        added_to.add(*self._dense(before), *self._dense(after))

    def end_seed(self) -> None:
        """Finish the current seed."""
        for comparison in self.comparisons.values():
            comparison.end_seed()

    def frame(self, name: str, confidence: float) -> pd.DataFrame:
        """Return one row per location and statistic that occurs in any pair of a comparison."""
        comparison = self.comparisons[name]
        used, not_finite, _ = comparison.counts
        rows, columns = np.nonzero(used + not_finite)
        labels = pd.DataFrame(list(self.locations), columns=keys_of(self.table), dtype=object)
        where = labels.reindex(columns=list(LOCATION_COLUMNS)).iloc[rows].reset_index(drop=True)
        where.insert(0, "table", self.table)
        statistics = np.array(list(self.columns), dtype=object)[columns]
        numbers = {name: numbers[rows, columns] for name, numbers in comparison.numbers(confidence).items()}
        return where.assign(statistic=statistics, **numbers)

    def _dense(self, means: Means) -> tuple[np.ndarray, np.ndarray]:
        """Return values and a mask of existing values at all locations; shape [locations, columns] each."""
        rows = [self.locations[location] for location in means.locations]
        cells = np.ix_(rows, [self.columns[name] for name in means.columns])
        values = np.zeros((len(self.locations), len(self.columns)))
        has_value = np.zeros(values.shape, dtype=bool)
        values[cells], has_value[cells] = means.values, means.counts > 0
        return values, has_value


class _Comparison:
    """The pairs of one comparison. The arrays grow with the number of locations; new ones have no earlier pairs.

    Attributes:
        counts: The numbers of pairs that are used, that are excluded because a number is NaN or infinite, and that are
            excluded because only one run has a number; int64 [3, locations, columns].
        seeds: For each seed, the means over its pairs of the value before, the value after, and the difference;
            [3, locations, columns] each, NaN without a pair.
    """

    def __init__(self, columns: int) -> None:
        self.counts = np.zeros((3, 0, columns), np.int64)
        self.seeds: list[np.ndarray] = []
        self._pairs_of_seed: list[np.ndarray] = []

    def add(self, before: np.ndarray, has_before: np.ndarray, after: np.ndarray, has_after: np.ndarray) -> None:
        """Add one pair: its numbers, and masks of existing numbers; shape [locations, columns] each."""
        with np.errstate(invalid="ignore", over="ignore"):
            numbers = np.stack([before, after, after - before])
        both = has_before & has_after
        used = both & np.isfinite(numbers[2])
        self.counts = _grown(self.counts, len(before), 0) + np.stack([used, both & ~used, has_before ^ has_after])
        self._pairs_of_seed.append(np.where(used, numbers, np.nan))

    def end_seed(self) -> None:
        """Merge the pairs of the current seed into one number per location."""
        if self._pairs_of_seed:
            self.seeds.append(_mean(_stacked(self._pairs_of_seed)))
            self._pairs_of_seed = []

    def numbers(self, confidence: float) -> dict[str, np.ndarray]:
        """Return the numeric columns of the result; NaN if there are too few seeds."""
        seeds = _stacked(self.seeds)
        before, after, difference = _mean(seeds)
        seed_counts = (~np.isnan(seeds[:, 2])).sum(0)
        with np.errstate(invalid="ignore", over="ignore"):  # an overflow results in a missing interval
            squares = np.nansum((seeds[:, 2] - difference) ** 2, axis=0)
            width, p_value = student(difference, squares, seed_counts, confidence)
            low, high = difference - width, difference + width
        return {
            "n": seed_counts,
            "mean_baseline": before,
            "mean_value": after,
            "difference": difference,
            "ci_low": _finite(low),
            "ci_high": _finite(high),
            "confidence": np.full(low.shape, confidence),
            "p_value": p_value,
            **dict(zip(("pairs", "not_finite", "one_sided"), self.counts, strict=True)),
        }


def _grown(array: np.ndarray, locations: int, fill: float) -> np.ndarray:
    """Return an array [..., locations, columns] with so many locations."""
    widths = [(0, 0)] * (array.ndim - 2) + [(0, locations - array.shape[-2]), (0, 0)]
    return np.pad(array, widths, constant_values=fill)


def _stacked(arrays: Sequence[np.ndarray]) -> np.ndarray:
    """Return arrays [3, locations, columns] as one; the last one has the most locations."""
    return np.stack([_grown(array, arrays[-1].shape[-2], np.nan) for array in arrays])


def _mean(numbers: np.ndarray) -> np.ndarray:
    """Return the mean over the first dimension without NaN. Equal numbers give this number, and sums do not overflow."""
    half = numbers / 2
    lowest = np.fmin.reduce(half)
    counts = np.maximum((~np.isnan(half)).sum(0), 1)
    mean: np.ndarray = 2 * (lowest + np.nansum((half - lowest) / counts, axis=0))
    return mean


def _finite(bounds: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(bounds), bounds, np.nan)
