"""What one key of the configuration changes: the differences between runs that are the same but for it, with their intervals."""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import pandas as pd

from ..errors import InstrumentError, InstrumentWarning, Mistake
from .load import Run, load
from .matching import Match, Matching, match, run_name
from .means import MEASURED, NUMBERS, PLACE, Means, Steps, keys_of, means_of

MOST_REASONS = 3  # of runs that are in no pair, in a warning


def effects_of(
    run: Run, key: str, *, baseline: Any = None, steps: Steps = (None, None), confidence: float = 0.95
) -> pd.DataFrame:
    """What a key changes; see `Run.effects_of`."""
    if not 0.0 < confidence < 1.0:
        raise InstrumentError(str(Mistake("confidence", "has to lie between 0 and 1", confidence)))
    matching = match(run, key, baseline)
    _warn_of(run, matching)
    differences = {table: _Differences(table) for table in MEASURED}
    for control, matches in _by_baseline(matching).items():
        before = load(run.folders[control])
        means = {table: means_of(before, table, steps) for table in MEASURED}
        for found in matches:
            after = load(run.folders[found.place])
            for table in MEASURED:
                differences[table].add(found.value, means[table], means_of(after, table, steps))
    parts = [
        (found, table.frame(found, confidence))
        for found in dict.fromkeys(found.value for found in matching.matches)
        for table in differences.values()
    ]
    frame = pd.concat([part for _, part in parts], ignore_index=True)
    frame.insert(0, "value", _cells([value for value, part in parts for _ in range(len(part))]))
    frame.insert(1, "baseline", _cells([matching.baseline] * len(frame)))
    frame.attrs = {
        "pairs": [(one.value, run_name(run, one.place), run_name(run, one.baseline)) for one in matching.matches],
        "left_out": {run_name(run, place): why for place, why in matching.left_out.items()},
    }
    return frame


def _by_baseline(matching: Matching) -> dict[int, list[Match]]:
    """The matches by the run that they share, so that each run is read once."""
    found: dict[int, list[Match]] = {}
    for one in matching.matches:
        found.setdefault(one.baseline, []).append(one)
    return found


def _warn_of(run: Run, matching: Matching) -> None:
    """Say how many runs are in no pair, and why the first of them are not."""
    if not matching.left_out:
        return
    whys = Counter(matching.left_out.values())
    told = "; ".join(f"{why} ({count})" for why, count in list(whys.items())[:MOST_REASONS])
    more = "; ..." if len(whys) > MOST_REASONS else ""
    count = f"{len(matching.left_out)} of {len(run.folders)} runs are in no pair"
    warnings.warn(f"{count}: {told}{more}. attrs['left_out'] has them all", InstrumentWarning, stacklevel=4)


def _cells(values: list[Any]) -> pd.Series:
    """A column of values as they are: numbers as numbers, and None as None."""
    return pd.Series(values, dtype=object if None in values else None)


class _Differences:
    """Paired differences at every place of one table, kept as counts, means and sums of squares: no run stays in memory.

    Means and squares are carried on pair by pair: B. P. Welford, Technometrics 4 (1962), 419-420.
    """

    def __init__(self, table: str) -> None:
        self.table = table
        self.places: dict[tuple[str, ...], int] = {}
        self.sums: dict[Any, _Sums] = {}

    def add(self, value: Any, before: Means, after: Means) -> None:
        """One more pair."""
        for place in (*before.places, *after.places):
            self.places.setdefault(place, len(self.places))
        sums = self.sums.setdefault(value, _Sums(len(NUMBERS[self.table])))
        sums.add(*self._spread(before), *self._spread(after))

    def frame(self, value: Any, confidence: float) -> pd.DataFrame:
        """A row for each place and statistic that any pair of the value has."""
        sums = self.sums[value]
        rows, columns = np.nonzero(sums.paired + sums.not_finite)
        labels = pd.DataFrame(list(self.places), columns=keys_of(self.table), dtype=object)
        where = labels.reindex(columns=list(PLACE)).iloc[rows].reset_index(drop=True)
        where.insert(0, "table", self.table)
        statistics = np.array(NUMBERS[self.table], dtype=object)[columns]
        numbers = {name: numbers[rows, columns] for name, numbers in sums.told(confidence).items()}
        return where.assign(statistic=statistics, **numbers)

    def _spread(self, means: Means) -> tuple[np.ndarray, np.ndarray]:
        """Values and whether there are any, at all places; shape [places, columns] each."""
        rows = [self.places[place] for place in means.places]
        values = np.zeros((len(self.places), len(NUMBERS[self.table])))
        known = np.zeros(values.shape, dtype=bool)
        values[rows], known[rows] = means.values, means.counts > 0
        return values, known


class _Sums:
    """What is kept of the pairs of one value; each array has the shape [places, columns], and grows with the places."""

    def __init__(self, columns: int) -> None:
        self.paired, self.not_finite, self.one_sided = (np.zeros((0, columns), dtype=np.int64) for _ in range(3))
        self.before, self.after, self.difference, self.squares = (np.zeros((0, columns)) for _ in range(4))

    def add(self, before: np.ndarray, has_before: np.ndarray, after: np.ndarray, has_after: np.ndarray) -> None:
        """One more pair: its numbers, and where it has any."""
        for name, kept in vars(self).items():
            setattr(self, name, np.pad(kept, ((0, len(before) - len(kept)), (0, 0))))
        with np.errstate(invalid="ignore", over="ignore"):
            difference = after - before
            counts = has_before & has_after & np.isfinite(difference)
            self.paired += counts
            paired = np.maximum(self.paired, 1)
            off = np.where(counts, difference - self.difference, 0.0)
            self.difference += off / paired
            self.squares += np.where(counts, off * (difference - self.difference), 0.0)
            self.before += np.where(counts, before - self.before, 0.0) / paired
            self.after += np.where(counts, after - self.after, 0.0) / paired
        self.not_finite += has_before & has_after & ~counts
        self.one_sided += has_before ^ has_after

    def told(self, confidence: float) -> dict[str, np.ndarray]:
        """The columns of numbers, null where too few pairs count."""
        from scipy.special import stdtrit

        freedom = np.maximum(self.paired - 1, 1)
        width = stdtrit(freedom, 1 - (1 - confidence) / 2) * np.sqrt(
            self.squares / freedom / np.maximum(self.paired, 1)
        )
        any_pair, several = self.paired > 0, (self.paired > 1) & np.isfinite(width)
        return {
            "n": self.paired,
            "mean_baseline": np.where(any_pair, self.before, np.nan),
            "mean_value": np.where(any_pair, self.after, np.nan),
            "difference": np.where(any_pair, self.difference, np.nan),
            "ci_low": np.where(several, self.difference - width, np.nan),
            "ci_high": np.where(several, self.difference + width, np.nan),
            "confidence": np.full(self.paired.shape, confidence),
            "not_finite": self.not_finite,
            "one_sided": self.one_sided,
        }
