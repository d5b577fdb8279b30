"""Effect of one configuration key: differences between paired runs, with confidence intervals."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd

from ..errors import InstrumentError, InstrumentWarning, Problem
from .confidence_interval import adjusted, bootstrapped, half_width, p_values
from .means_over_steps import LOCATION_COLUMNS, MEASURED_TABLES, Means, Steps, averaged_columns, keys_of, means_of
from .run_matching import RunMatches, match_runs, run_name
from .run_tables import RunTables

MOST_REASONS = 3  # maximum number of reasons in the warning about unpaired runs
Interval = Literal["t", "bootstrap"]


def effects_of(
    run: RunTables,
    key: str,
    *,
    baseline: Any,
    by: str | Sequence[str],
    steps: Steps,
    confidence: float,
    interval: Interval,
) -> pd.DataFrame:
    """Estimate the effect of a key; see `Run.effects_of`."""
    if not 0.0 < confidence < 1.0:
        raise InstrumentError(str(Problem("confidence", "must be between 0 and 1", confidence)))
    if interval not in (allowed := get_args(Interval)):
        raise InstrumentError(str(Problem("interval", "is unknown", interval, " or ".join(allowed))))
    _check_steps(steps)
    others = [by] if isinstance(by, str) else list(by)
    run_matches = match_runs(run, key, baseline, others)
    _warn_unpaired(run, run_matches)
    differences = {table: _Differences(table, averaged_columns(run, table), interval) for table in MEASURED_TABLES}
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
        "pairs": [(one.value, run_name(run, one.index), run_name(run, one.baseline)) for one in run_matches.matches],
        "left_out": {run_name(run, index): reason for index, reason in run_matches.left_out.items()},
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
    raise InstrumentError(str(Problem("steps", "the range contains no steps", steps, allowed)))


def _means_of_run(run: RunTables, index: int, steps: Steps) -> dict[str, Means]:
    """Return the means of one run, by table."""
    folder = run.folders[index]
    one = RunTables(folder, [folder])
    return {table: means_of(one, table, steps) for table in MEASURED_TABLES}


def _warn_unpaired(run: RunTables, run_matches: RunMatches) -> None:
    """Warn about the number of unpaired runs, with some of the reasons."""
    if not run_matches.left_out:
        return
    counts = Counter(run_matches.left_out.values())
    reasons = "; ".join(f"{reason} ({count})" for reason, count in list(counts.items())[:MOST_REASONS])
    more = "; ..." if len(counts) > MOST_REASONS else ""
    unpaired = f"{len(run_matches.left_out)} of {len(run.folders)} runs are not in any pair"
    warnings.warn(f"{unpaired}: {reasons}{more}. attrs['left_out'] lists all of them", InstrumentWarning, stacklevel=4)


def _cells(values: list[Any]) -> pd.Series:
    """Return a column in which numbers stay numbers and None stays None."""
    return pd.Series(values, dtype=object if None in values else None)


class _Differences:
    """Paired differences at all locations of one table; the memory needed does not grow with the number of runs.

    Args:
        table: The table.
        columns: The columns of the table that are averaged in any run.
        interval: The kind of the intervals. For a bootstrap, the differences of all seeds are kept.
    """

    def __init__(self, table: str, columns: Sequence[str], interval: Interval) -> None:
        self.table = table
        self.interval = interval
        self.columns = {name: index for index, name in enumerate(columns)}
        self.locations: dict[tuple[str, ...], int] = {}
        self.sums: dict[str, _Sums] = {}

    def add(self, comparison: str, before: Means, after: Means) -> None:
        """Add one pair."""
        for location in (*before.locations, *after.locations):
            self.locations.setdefault(location, len(self.locations))
        sums = self.sums.setdefault(comparison, _Sums(len(self.columns), [] if self.interval == "bootstrap" else None))
        sums.add(*self._dense(before), *self._dense(after))

    def end_seed(self) -> None:
        """Finish the current seed."""
        for sums in self.sums.values():
            sums.end_seed()

    def frame(self, comparison: str, confidence: float) -> pd.DataFrame:
        """Return one row per location and statistic that occurs in any pair of a comparison."""
        sums = self.sums[comparison]
        rows, columns = np.nonzero(sums.pairs + sums.not_finite)
        labels = pd.DataFrame(list(self.locations), columns=keys_of(self.table), dtype=object)
        where = labels.reindex(columns=list(LOCATION_COLUMNS)).iloc[rows].reset_index(drop=True)
        where.insert(0, "table", self.table)
        statistics = np.array(list(self.columns), dtype=object)[columns]
        numbers = {name: numbers[rows, columns] for name, numbers in sums.columns(confidence).items()}
        return where.assign(statistic=statistics, **numbers)

    def _dense(self, means: Means) -> tuple[np.ndarray, np.ndarray]:
        """Return values and a mask of existing values at all locations; shape [locations, columns] each."""
        rows = [self.locations[location] for location in means.locations]
        cells = np.ix_(rows, [self.columns[name] for name in means.columns])
        values = np.zeros((len(self.locations), len(self.columns)))
        has_value = np.zeros(values.shape, dtype=bool)
        values[cells], has_value[cells] = means.values, means.counts > 0
        return values, has_value


class _Sums:
    """Running sums over the pairs of one comparison; the arrays grow with the number of locations.

    Means and squares are updated with Welford's algorithm: B. P. Welford, Technometrics 4 (1962), 419-420.

    Attributes:
        pairs: Number of pairs used, over all seeds; shape [locations, columns], as all attributes except the means.
        not_finite: Number of pairs excluded because a number is NaN or infinite.
        one_sided: Number of pairs excluded because only one run has a number.
        seeds: Number of seeds with at least one used pair.
        squares: Sum over the seeds of the squared distance between the difference and its mean.
        means: Means over the seeds of the value before, the value after, and the difference; shape [3, locations,
            columns].
        differences: The difference of each seed, [locations, columns] each, NaN for no pair; None if they are not kept.
        of_seed: Number of used pairs of the current seed.
        means_of_seed: As `means`, over the pairs of the current seed.
    """

    def __init__(self, columns: int, differences: list[np.ndarray] | None) -> None:
        self.differences = differences
        self.pairs, self.not_finite, self.one_sided = (np.zeros((0, columns), dtype=np.int64) for _ in range(3))
        self.seeds, self.of_seed = (np.zeros((0, columns), dtype=np.int64) for _ in range(2))
        self.squares = np.zeros((0, columns))
        self.means, self.means_of_seed = (np.zeros((3, 0, columns)) for _ in range(2))

    def add(self, before: np.ndarray, has_before: np.ndarray, after: np.ndarray, has_after: np.ndarray) -> None:
        """Add one pair: its numbers, and masks of existing numbers; shape [locations, columns] each."""
        self._grow(len(before))
        with np.errstate(invalid="ignore", over="ignore"):
            numbers = np.stack([before, after, after - before])
        both = has_before & has_after
        counts = both & np.isfinite(numbers[2])
        self.not_finite += both & ~counts
        self.one_sided += has_before ^ has_after
        self.pairs += counts
        self.of_seed += counts
        self.means_of_seed += _mean_update(numbers, self.means_of_seed, self.of_seed, counts)

    def end_seed(self) -> None:
        """Merge the pairs of the current seed into one number per location."""
        counts = self.of_seed > 0
        self.seeds += counts
        previous_means = self.means[2].copy()
        self.means += _mean_update(self.means_of_seed, self.means, self.seeds, counts)
        with np.errstate(invalid="ignore", over="ignore"):  # an overflow results in a missing interval
            off = self.means_of_seed[2] - previous_means
            self.squares += np.where(counts, off * (self.means_of_seed[2] - self.means[2]), 0.0)
        if self.differences is not None:
            self.differences.append(np.where(counts, self.means_of_seed[2], np.nan))
        self.of_seed[:], self.means_of_seed[:] = 0, 0.0

    def columns(self, confidence: float) -> dict[str, np.ndarray]:
        """Return the numeric columns of the result; NaN if there are too few seeds."""
        before, after, difference = np.where(self.seeds > 0, self.means, np.nan)
        low, high, p_value = self._intervals(difference, confidence)
        return {
            "n": self.seeds,
            "mean_baseline": before,
            "mean_value": after,
            "difference": difference,
            "ci_low": _finite(low),
            "ci_high": _finite(high),
            "confidence": np.full(low.shape, confidence),
            "p_value": p_value,
            "pairs": self.pairs,
            "not_finite": self.not_finite,
            "one_sided": self.one_sided,
        }

    def _intervals(self, difference: np.ndarray, confidence: float) -> Sequence[np.ndarray]:
        """Return the bounds of the intervals, and p-values; shape [locations, columns] each."""
        with np.errstate(over="ignore"):
            if self.differences is None:
                width = half_width(self.squares, self.seeds, confidence)
                return difference - width, difference + width, p_values(difference, self.squares, self.seeds)
            numbers = np.full((len(self.differences), *difference.shape), np.nan)
            for seed, found in enumerate(self.differences):
                numbers[seed, : len(found)] = found  # Later seeds can have more locations.
            flat = bootstrapped(numbers.reshape(len(numbers), -1), confidence)
            return [values.reshape(difference.shape) for values in flat]

    def _grow(self, locations: int) -> None:
        if locations == len(self.pairs):
            return
        for name, array in vars(self).items():
            if name == "differences":
                continue
            more = np.zeros((*array.shape[:-2], locations - array.shape[-2], array.shape[-1]), array.dtype)
            setattr(self, name, np.concatenate([array, more], axis=-2))


def _mean_update(numbers: np.ndarray, means: np.ndarray, count: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return the change of means after one more number, where `counts` is true; dividing first avoids an overflow."""
    share = 1.0 / np.maximum(count, 1)
    return np.where(counts, np.where(counts, numbers, 0.0) * share - means * share, 0.0)


def _finite(bounds: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(bounds), bounds, np.nan)
