"""Statistics over steps in bounded memory: one number for each location and group of steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..spec.statistics import statistic_of

ROOM = 200_000  # the maximum number of values of all statistics and locations
FEWEST, MOST = 16, 512  # limits of the number of groups of steps


@dataclass
class _Values:
    """One statistic: [locations, groups]. Means have the sums and the numbers of values."""

    merged: str
    numbers: np.ndarray
    counts: np.ndarray | None
    last: np.ndarray  # [locations], the value at the largest step
    last_step: np.ndarray  # [locations]

    @classmethod
    def empty(cls, merged: str, shape: tuple[int, int]) -> _Values:
        is_mean = merged == "mean"
        counts = np.zeros(shape) if is_mean else None
        last = np.full(shape[0], np.nan)
        return cls(merged, np.full(shape, 0.0 if is_mean else np.nan), counts, last, np.full(shape[0], -1))

    def add(self, rows: np.ndarray, columns: np.ndarray, steps: np.ndarray, values: np.ndarray) -> None:
        """Add values, in ascending order of steps. Missing values (NaN) are ignored."""
        known = ~np.isnan(values)
        rows, values, steps = rows[known], values[known], steps[known]
        index = rows * self.numbers.shape[1] + columns[known]
        newer = steps >= self.last_step[rows]
        self.last[rows[newer]] = values[newer]
        self.last_step[rows[newer]] = steps[newer]
        if self.counts is None:
            (np.fmin if self.merged == "min" else np.fmax).at(self.numbers.reshape(-1), index, values)
        else:
            np.add.at(self.numbers.reshape(-1), index, values)
            np.add.at(self.counts.reshape(-1), index, 1.0)

    def grown(self, shape: tuple[int, int]) -> _Values:
        """Return a copy with more rows and columns."""
        copy = _Values.empty(self.merged, shape)
        rows, columns = self.numbers.shape
        copy.numbers[:rows, :columns] = self.numbers
        if copy.counts is not None:
            copy.counts[:rows, :columns] = self.counts
        copy.last[:rows], copy.last_step[:rows] = self.last, self.last_step
        return copy

    def merge(self, order: np.ndarray, starts: np.ndarray) -> None:
        """Merge columns: those in `order` from each start to the next become one."""
        how = {"min": np.fmin, "max": np.fmax}.get(self.merged, np.add)
        for cells in (self.numbers,) if self.counts is None else (self.numbers, self.counts):
            merged = how.reduceat(cells[:, order], starts, axis=1)
            cells[:] = 0.0 if self.merged == "mean" else np.nan
            cells[:, : merged.shape[1]] = merged

    def read(self, columns: np.ndarray) -> np.ndarray:
        """Return the values of some columns; NaN for missing ones."""
        numbers: np.ndarray = self.numbers[:, columns]
        if self.counts is None:
            return numbers
        with np.errstate(invalid="ignore", divide="ignore"):
            means: np.ndarray = numbers / self.counts[:, columns]
        return means


class StepHistory:
    """Values of statistics at locations over steps, in groups of equally many steps.

    Rows can be added in any order of steps. When the number of groups reaches its limit, the groups become twice as
    wide. So memory is bounded, and the result does not depend on the order of the rows.

    Args:
        room: The maximum number of values.

    Attributes:
        locations: The names of the locations, by row of the values.
        width: The number of steps of a group.
        rebuilt: The version of the last change to groups, locations or statistics that concerns all values.
    """

    def __init__(self, room: int = ROOM) -> None:
        self.room = room
        self.locations: list[str] = []
        self.width = 1
        self.rebuilt = 0
        self._row_of: dict[str, int] = {}
        self._values: dict[str, _Values] = {}
        self._column_of: dict[int, int] = {}  # by step // width
        self._shape = (1, FEWEST)  # allocated
        self._first = np.full(FEWEST, np.iinfo(np.int64).max)
        self._last = np.full(FEWEST, -1)
        self._steps = np.zeros(FEWEST, np.int64)  # number of different steps in each group
        self._versions = np.zeros(FEWEST, np.int64)  # of the last change in each group

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
        """Add rows.

        Args:
            locations: Names of locations.
            index: The index of the location of each row in `locations`; int64, shape [rows].
            steps: The step of each row; int64, shape [rows].
            values: By statistic, float64, shape [rows]; NaN for missing values.
            version: The current version, which increases over time.
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
                self._values[name] = _Values.empty(statistic_of(name).merged, self._shape)
                self.rebuilt = version
        columns = self._columns_of(steps, version)
        rows = np.array([self._row_of[name] for name in locations])[index]
        for name, column in new.items():
            self._values[name].add(rows, columns, steps, column)
        np.minimum.at(self._first, columns, steps)
        np.maximum.at(self._last, columns, steps)
        np.add.at(self._steps, columns[np.unique(steps, return_index=True)[1]], 1)
        self._versions[columns] = version

    def _columns_of(self, steps: np.ndarray, version: int) -> np.ndarray:
        """Return the column of the group of each step. Groups become wider if there are too many."""
        most = int(np.clip(self.room // max(1, len(self.locations) * len(self._values)), FEWEST, MOST))
        unique, index = np.unique(steps // self.width, return_inverse=True)
        while len({*self._column_of, *unique.tolist()}) > most:
            self._widen(version)
            unique, index = np.unique(steps // self.width, return_inverse=True)
        for key in unique.tolist():
            self._column_of.setdefault(key, len(self._column_of))
        self._allocate()
        return np.array([self._column_of[key] for key in unique.tolist()], np.int64)[index]

    def _widen(self, version: int) -> None:
        """Double the width of the groups."""
        self.width *= 2
        self.rebuilt = version
        if not self._column_of:
            return
        keys = np.array(sorted(self._column_of))
        order = np.array([self._column_of[key] for key in keys.tolist()])
        halves, starts = np.unique(keys // 2, return_index=True)
        for values in self._values.values():
            values.merge(order, starts)
        for how, cells, empty in (
            (np.minimum, self._first, np.iinfo(np.int64).max),
            (np.maximum, self._last, -1),
            (np.add, self._steps, 0),
            (np.maximum, self._versions, 0),
        ):
            merged = how.reduceat(cells[order], starts)
            cells[:] = empty
            cells[: len(merged)] = merged
        self._column_of = {key: column for column, key in enumerate(halves.tolist())}

    def _allocate(self) -> None:
        """Enlarge the arrays for all locations and groups, by at least a factor of two."""
        rows, columns = self._shape
        while rows < len(self.locations):
            rows *= 2
        while columns < len(self._column_of):
            columns *= 2
        if columns > self._shape[1]:
            more = columns - self._shape[1]
            self._first = np.pad(self._first, (0, more), constant_values=np.iinfo(np.int64).max)
            self._last = np.pad(self._last, (0, more), constant_values=-1)
            self._steps = np.pad(self._steps, (0, more))
            self._versions = np.pad(self._versions, (0, more))
        if (rows, columns) != self._shape:
            self._shape = (rows, columns)
            self._values = {name: values.grown(self._shape) for name, values in self._values.items()}

    def groups(self, since: int = -1) -> np.ndarray:
        """Return the columns of the groups that changed after a version, in the order of the steps; int64."""
        order = [self._column_of[key] for key in sorted(self._column_of)]
        columns = np.array(order, np.int64)
        return columns[self._versions[columns] > since]

    def steps(self, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the first step, the last step and the number of different steps of some groups."""
        return self._first[columns], self._last[columns], self._steps[columns]

    def values(self, statistic: str, columns: np.ndarray) -> np.ndarray:
        """Return a statistic in some groups; float64, shape [locations, groups]; NaN for missing values."""
        return self._values[statistic].read(columns)[: len(self.locations)]

    def last(self, statistic: str) -> np.ndarray:
        """Return a statistic at the largest step of each location; float64, shape [locations]; NaN without a value."""
        return self._values[statistic].last[: len(self.locations)]

    @property
    def last_step(self) -> int:
        """The largest step; -1 if there are no rows."""
        return int(self._last.max())
