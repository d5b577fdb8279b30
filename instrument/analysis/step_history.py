"""Statistics and distributions over steps in bounded memory.

Of a statistic, there is one number for each location and group of steps. Of distributions, there are those of some steps, spread evenly
over the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from ..tables.statistics import statistic_of
from .plot_data import RecordedSeries

MAX_VALUES = 200_000  # the maximum number of values of all statistics and locations
FEWEST, MOST = 16, 1_024  # limits of the number of groups of steps
NO_STEPS = np.array([[np.iinfo(np.int64).max], [-1], [0]])  # first and last step, last change
MERGED = (np.minimum, np.maximum, np.maximum)
RULES: dict[str, tuple[np.ufunc, float]] = {"min": (np.fmin, np.nan), "max": (np.fmax, np.nan), "mean": (np.add, 0.0)}
"""How the values of a group are merged, and the value of an empty group: a mean is a sum here."""


class _Values:
    """One statistic: numbers and how many values each of them has, [locations, groups], and the last of each location."""

    def __init__(self, merged: str, shape: tuple[int, int]) -> None:
        self.is_mean = merged == "mean"
        self.merge, self.empty = RULES[merged]
        self.numbers = np.full(shape, self.empty)
        self.counts = np.zeros(shape)
        self.last, self.last_step = np.full(shape[0], np.nan), np.full(shape[0], -1)

    def add(self, rows: np.ndarray, columns: np.ndarray, steps: np.ndarray, values: np.ndarray) -> None:
        """Add values, in ascending order of steps. Missing values (NaN) are ignored."""
        known = ~np.isnan(values)
        rows, values, steps = rows[known], values[known], steps[known]
        index = rows * self.numbers.shape[1] + columns[known]
        newer = steps >= self.last_step[rows]
        self.last[rows[newer]] = values[newer]
        self.last_step[rows[newer]] = steps[newer]
        self.merge.at(self.numbers.reshape(-1), index, values)
        np.add.at(self.counts.reshape(-1), index, 1.0)

    def grow(self, shape: tuple[int, int]) -> None:
        """Add empty rows and columns."""
        rows, columns = (size - before for size, before in zip(shape, self.numbers.shape, strict=True))
        self.numbers = np.pad(self.numbers, ((0, rows), (0, columns)), constant_values=self.empty)
        self.counts = np.pad(self.counts, ((0, rows), (0, columns)))
        self.last = np.pad(self.last, (0, rows), constant_values=np.nan)
        self.last_step = np.pad(self.last_step, (0, rows), constant_values=-1)

    def read(self, columns: np.ndarray) -> np.ndarray:
        """Return the values of some columns; NaN for missing ones."""
        numbers: np.ndarray = self.numbers[:, columns]
        with np.errstate(invalid="ignore", divide="ignore"):
            return numbers / self.counts[:, columns] if self.is_mean else numbers


class StepHistory:
    """Values of statistics at locations over steps, in groups of equally many steps.

    Rows can be added in any order of steps. When the number of groups reaches its limit, the groups become twice as wide. So memory is
    bounded, and the result does not depend on the order of the rows. `room`: the maximum number of values.
    """

    def __init__(self, room: int = MAX_VALUES) -> None:
        self.room = room
        self.locations: list[str] = []  # by row of the values
        self.width = 1  # the number of steps of a group
        self.rebuilt = 0  # the version of the last change to groups, locations or statistics that concerns all values
        self.has_several = False  # whether a location has several rows in a step, as far as these were added together
        self._row_of: dict[str, int] = {}
        self._values: dict[str, _Values] = {}
        self._column_of: dict[int, int] = {}  # by step // width
        self._shape = (1, FEWEST)  # allocated
        self._groups = np.repeat(NO_STEPS, FEWEST, axis=1)

    @property
    def statistics(self) -> list[str]:
        """The names of the statistics with at least one value."""
        return list(self._values)

    def add(
        self,
        locations: Sequence[str],
        index: np.ndarray,
        steps: np.ndarray,
        values: Mapping[str, np.ndarray],
        version: int,
    ) -> None:
        """Add rows: `index`, the location of each in `locations`, int64 [rows]; its step, int64 [rows]; and its values.

        `values`: by statistic, float64 [rows]; NaN for missing ones. `version` increases over time.
        """
        order = np.argsort(steps, kind="stable")
        index, steps = index[order], steps[order]
        new = {name: column[order] for name, column in values.items() if not np.isnan(column).all()}
        for name in locations:
            if name not in self._row_of:
                self._row_of[name] = len(self.locations)
                self.locations.append(name)
                self.rebuilt = version
        for name in new:
            if name not in self._values:
                self._values[name] = _Values(statistic_of(name).merged, self._shape)
                self.rebuilt = version
        columns = self._columns_of(steps, version)
        rows = np.array([self._row_of[name] for name in locations])[index]
        self.has_several |= len(np.unique(steps * len(self.locations) + rows)) < len(rows)
        for name, column in new.items():
            self._values[name].add(rows, columns, steps, column)
        first, last, versions = self._groups
        np.minimum.at(first, columns, steps)
        np.maximum.at(last, columns, steps)
        versions[columns] = version

    def _columns_of(self, steps: np.ndarray, version: int) -> np.ndarray:
        """Return the column of the group of each step. Groups become wider if there are too many."""
        most = int(np.clip(self.room // max(1, len(self.locations) * len(self._values)), FEWEST, MOST))
        unique, index = np.unique(steps // self.width, return_inverse=True)
        while len({*self._column_of, *unique.tolist()}) > most:
            self._widen(version)
            unique, index = np.unique(steps // self.width, return_inverse=True)
        for key in unique.tolist():
            self._column_of.setdefault(key, len(self._column_of))
        rows, columns = self._shape  # the arrays grow by at least a factor of two
        while rows < len(self.locations):
            rows *= 2
        while columns < len(self._column_of):
            columns *= 2
        self._groups = np.hstack([self._groups, np.repeat(NO_STEPS, columns - self._shape[1], axis=1)])
        if (rows, columns) != self._shape:
            self._shape = (rows, columns)
            for values in self._values.values():
                values.grow(self._shape)
        return np.array([self._column_of[key] for key in unique.tolist()], np.int64)[index]

    def _widen(self, version: int) -> None:
        self.width *= 2
        self.rebuilt = version
        if not self._column_of:
            return
        keys = np.array(sorted(self._column_of))
        order = np.array([self._column_of[key] for key in keys.tolist()])
        halves, starts = np.unique(keys // 2, return_index=True)
        parts: list[tuple[np.ndarray, np.ufunc, float]] = [
            (row, how, empty) for row, how, (empty,) in zip(self._groups, MERGED, NO_STEPS, strict=True)
        ]
        for values in self._values.values():
            parts += [(values.numbers, values.merge, values.empty), (values.counts, np.add, 0.0)]
        for cells, merge, empty in parts:
            merged = merge.reduceat(cells[..., order], starts, axis=-1)
            cells[:] = empty
            cells[..., : len(starts)] = merged
        self._column_of = {key: column for column, key in enumerate(halves.tolist())}

    def groups(self, since: int = -1) -> np.ndarray:
        """Return the columns of the groups that changed after a version, in the order of the steps; int64."""
        columns = np.array([self._column_of[key] for key in sorted(self._column_of)], np.int64)
        changed: np.ndarray = columns[self._groups[2, columns] > since]
        return changed

    def steps(self, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first and the last step of some groups."""
        first, last = self._groups[:2, columns]
        return first, last

    def values(self, statistic: str, columns: np.ndarray) -> np.ndarray:
        """Return a statistic in some groups; float64, shape [locations, groups]; NaN for missing values."""
        return self._values[statistic].read(columns)[: len(self.locations)]

    def last(self, statistic: str) -> np.ndarray:
        """Return a statistic at the largest step of each location; float64, shape [locations]; NaN without a value."""
        return self._values[statistic].last[: len(self.locations)]

    def last_steps(self, statistic: str) -> np.ndarray:
        """Return the steps of `last`; int64, shape [locations]; -1 without a value."""
        return self._values[statistic].last_step[: len(self.locations)]

    @property
    def last_step(self) -> int:
        """The largest step; -1 if there are no rows."""
        return int(self._groups[1].max())


MAX_NUMBERS = 120_000  # the maximum number of quantiles and counts of all locations
FEWEST_ROWS, MOST_ROWS = 2, 40  # limits of the number of steps per location
DISTRIBUTION_COLUMNS = ("levels", "quantiles", "low", "high", "counts")


@dataclass
class LocationDistributions:
    """The distributions of one location: the last row of each group of `width` steps, and the first row of a step."""

    # By step // width: step, version, row.
    rows: dict[int, tuple[int, int, dict[str, Any]]] = field(default_factory=dict)
    width: int = 1
    step_count: int = 0  # the number of recorded steps
    has_several: bool = False  # whether a step has several rows


class DistributionHistory:
    """The distributions of all locations of a run, by series and name of the location."""

    def __init__(self) -> None:
        self.locations: dict[tuple[RecordedSeries, str], LocationDistributions] = {}
        self.rebuilt = 0  # the version of the last change that concerns more than some steps
        self._numbers = 1  # the largest number of quantiles and counts in a row

    def add(self, at: tuple[RecordedSeries, str], rows: pa.Table, version: int) -> None:
        """Add rows of one location in the order in which they were written, with the columns `step` and `DISTRIBUTION_COLUMNS`."""
        location = self.locations.get(at)
        if location is None:
            location = self.locations[at] = LocationDistributions()
            self.rebuilt = version
        steps, first = np.unique(rows["step"].to_numpy(), return_index=True)
        location.step_count += len(steps)
        location.has_several |= len(steps) < rows.num_rows
        (row,) = rows.slice(int(first[0]), 1).to_pylist()
        self._numbers = max(self._numbers, len(row["quantiles"] or ()) + len(row["counts"] or ()))
        while True:  # groups become wider until there are few enough
            keys = steps // location.width
            most = int(np.clip(MAX_NUMBERS // (len(self.locations) * self._numbers), FEWEST_ROWS, MOST_ROWS))
            if len({*location.rows, *keys.tolist()}) <= most:
                break
            location.width *= 2
            location.rows = {key // 2: location.rows[key] for key in sorted(location.rows)}  # of two, the later row
            self.rebuilt = version
        last = np.append(keys[1:] != keys[:-1], True)
        kept = rows.take(first[last]).select(DISTRIBUTION_COLUMNS).to_pylist()
        for key, step, row in zip(keys[last].tolist(), steps[last].tolist(), kept, strict=True):
            if key not in location.rows or location.rows[key][0] < step:
                location.rows[key] = step, version, row
