"""Bounds of the values of a step: one comparison with them shows that most rules cannot fire in it.

Most steps of a training are similar to the steps before them. A rule states the bounds within which it does not fire. It reads a
step outside of them at once. Steps within them are kept, and the rules add them to their state before the next step that they read.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..config.schedule import STEP_PHASES
from ..errors import HookError
from ..tables.statistics import ALL
from .reference_ranges import METRICS
from .rule import RELATIONS, TARGETS, Bounds, CatalogueRule, LocatedRule, QuietSteps, Rule
from .step_rows import FloatArray, IndexArray, Locations, Numbers, RowLayout, StepRows

MAX_STEPS, MAX_ROWS = 500, 20_000  # the memory of kept steps is bounded
STEPS_UNTIL_RENEWAL = 128  # if a rule has to read each step: the bounds of the others may then contain its values again
MAX_LAYOUTS = 64
_LARGEST = sys.float_info.max
_NO_NUMBERS: Numbers = ((), np.empty((0, 0)))


_Rows = tuple[bytes, bytes, bytes, tuple[str, ...], bytearray]
"""What `keep_step` has to know of the steps with the same rows.

bounds: For some statistics, the index, a count, as many lowest numbers, and as many highest ones, float64. The count is 1 if all rows
    have the same.
kept: The indices of the kept statistics, float64.
limits: The lowest values of metrics and the highest ones, float64 [2, names].
names: The names of the metrics with limits, first that of the loss.
steps: The memory of the kept steps, float64: of each, the loss, NaN for none, and the kept statistics of all rows.
"""

try:
    from ..stats.native import keep_step
# Installed without a C compiler.
except ImportError:

    def keep_step(rows: _Rows, at: int, numbers: FloatArray, metrics: Mapping[str, Any], is_training: bool) -> bool:  # type: ignore[misc]
        """Keep a step at an index if its numbers and metrics are within the bounds. Return whether they are.

        Args:
            numbers: float64 [statistics, rows]; NaN, a missing value, is within all bounds.
            metrics: The metrics; a missing one is within all limits, NaN is not.
            is_training: Whether its loss is kept.
        """
        bounds, kept, limits, names, steps = rows
        values = [*map(metrics.get, names)]
        of_names = zip(values, *np.frombuffer(limits).reshape(2, -1).tolist(), strict=True)
        if not all(value is None or least <= value <= most for value, least, most in of_names):
            return False
        left = np.frombuffer(bounds)
        while len(left):
            of_rows, count = numbers[int(left[0])], int(left[1])
            low, high, left = np.split(left[2:], [count, 2 * count])
            if ((of_rows < low) | (of_rows > high)).any():
                return False
        loss = values[0] if is_training and values else None
        step = np.append(math.nan if loss is None else float(loss), numbers[np.frombuffer(kept).astype(np.int64)])
        np.frombuffer(steps).reshape(-1, len(step))[at] = step
        return True


class _QuietRows(NamedTuple):
    """The steps with the rows of a layout.

    Attributes:
        statistics: The statistics of their numbers, as indices in `ALL`.
        layout: The layout.
        names: The kept statistics.
        rows: See `keep_step`.
        limit: The number of steps for which there is memory.
    """

    statistics: Sequence[int]
    layout: RowLayout
    names: Sequence[str]
    rows: _Rows
    limit: int

    def table(self, count: int) -> tuple[RowLayout, Callable[[str], FloatArray], Sequence[float | None]]:
        """Return the first kept steps as in `QuietSteps`."""
        names, rows = self.names, len(self.layout)
        width = 1 + len(names) * rows
        steps = np.frombuffer(self.rows[-1], count=count * width).reshape(count, width).copy()
        values = steps[:, 1:].reshape(count, len(names), rows)
        losses = [None if math.isnan(loss) else loss for loss in steps[:, 0].tolist()]

        def column(name: str) -> FloatArray:
            return values[:, names.index(name)] if name in names else np.full((count, rows), np.nan)

        return self.layout, column, losses


class StepBounds:
    """The bounds of the rules that do not have to read each step."""

    def __init__(self, rules: Mapping[str, Rule], locations: Locations) -> None:
        self._rules = rules
        self._locations = locations
        self.active: Mapping[str, Rule] = {}  # the rules that read each step, also within the bounds
        self._resting: dict[str, CatalogueRule[Any]] = {}  # the other rules
        self._left = 0  # for how many further steps the bounds hold
        self._last = 0  # the last step for which they hold
        # Also of the numbers of targets and rows of relations.
        self._metrics: dict[str, tuple[float, float]] = {}
        self._names: tuple[str, ...] = ()
        self._limits = b""
        self._low = self._high = np.empty((0, len(ALL)))  # [locations and a new one, statistics]
        self._of_layout: dict[RowLayout, _QuietRows] = {}
        self._latest: _QuietRows | None = None  # the rows of the latest kept steps
        self._count = 0  # of these steps
        self._earlier: list[Any] = []  # the tables of the steps before, which have other rows
        self._used = 0.0  # the fraction of the memory that they take

    def contain(
        self, step: int, phase: str, metrics: Mapping[str, Any], layout: RowLayout, numbers: Numbers | None
    ) -> bool:
        """Return whether a step is within the bounds. If it is, keep its values.

        Args:
            step: The step.
            phase: The phase.
            metrics: The metrics, also the numbers of targets and rows of relations if there are any.
            layout: The locations of the rows.
            numbers: See `StepRows`.
        """
        if not self._left or step > self._last or phase not in STEP_PHASES:
            return False
        if numbers is None:
            if len(layout):
                return False
            numbers = _NO_NUMBERS
        statistics, values = numbers
        rows = self._of_layout.get(layout)
        if rows is None or rows[0] is not statistics:
            rows = self._rows_of(layout, statistics)
        if rows is not self._latest or self._count >= rows[4]:
            self._begin_rows(rows)
        if not keep_step(rows[3], self._count, values, metrics, phase == "train"):
            return False
        self._left -= 1
        self._count += 1
        return True

    def _begin_rows(self, rows: _QuietRows | None) -> None:
        """Begin to keep steps with other rows, or to use the memory again."""
        latest, count, self._latest, self._count = self._latest, self._count, rows, 0
        if latest is not None and count:
            self._earlier.append(latest.table(count))
            self._used += count / latest.limit
            if self._used >= 1:
                self.catch_up()

    def _rows_of(self, layout: RowLayout, statistics: Sequence[int]) -> _QuietRows:
        """Return the bounds of statistics of a layout. Rows of a new location are outside of them."""
        if len(self._of_layout) >= MAX_LAYOUTS:
            self._of_layout.clear()
        at = np.minimum(layout.numbers, len(self._low) - 1)
        parts = []
        for index, statistic in enumerate(statistics):
            low, high = self._low[at, statistic], self._high[at, statistic]
            if not ((low > -math.inf) | (high < math.inf)).any():
                continue
            if (low == low[0]).all() and (high == high[0]).all():
                low, high = low[:1], high[:1]
            parts += [[index, len(low)], low, high]
        read = {name for rule in self._resting.values() for name in rule.remembered()}
        kept = [index for index, statistic in enumerate(statistics) if ALL[statistic] in read]
        bounds, indices = (np.concatenate([np.empty(0), *each]).tobytes() for each in (parts, [kept]))
        limit = max(1, min(MAX_STEPS, MAX_ROWS // max(1, len(layout))))
        steps = bytearray(8 * limit * (1 + len(kept) * len(layout)))
        names = [ALL[statistics[index]] for index in kept]
        of_rows = bounds, indices, self._limits, self._names, steps
        rows = self._of_layout[layout] = _QuietRows(statistics, layout, names, of_rows, limit)
        return rows

    def catch_up(self) -> None:
        """Pass the kept steps to the rules that have not read them.

        Raises:
            HookError: A rule of an installed package reads a statistic that it does not list in `remembered`.
        """
        if self._count:
            self._begin_rows(self._latest)
        if tables := self._earlier:
            losses = [loss for *_, of_steps in tables for loss in of_steps if loss is not None]
            self._earlier, self._used = [], 0.0
            for name, rule in self._resting.items():
                read = [
                    (layout, _listed(column, name, rule), of_steps)
                    for layout, column, of_steps in tables
                    if len(layout)
                ]
                rule.remember(QuietSteps(losses, read))

    def renew(self, rows: StepRows) -> None:
        """Ask the rules for their bounds.

        All rules have read `rows`. A rule whose bounds do not contain them has to read each step.
        """
        self._of_layout.clear()
        self._metrics = {"loss": (-_LARGEST, _LARGEST)}
        self._low, self._high = np.full((2, len(self._locations.all) + 1, len(ALL)), [[[-math.inf]], [[math.inf]]])
        self._low[-1] = math.inf
        self._high[:, [ALL.index("nan_count"), ALL.index("inf_count")]] = 0.0
        self._resting, self._left, self._last = {}, sys.maxsize, sys.maxsize
        active = {}
        for name, rule in self._rules.items():
            if isinstance(rule, CatalogueRule) and self._narrow(rule, rows):
                self._resting[name] = rule
            else:
                active[name] = rule
        if active:
            self._left = min(self._left, STEPS_UNTIL_RENEWAL)
        self.active = active
        self._names, self._limits = (*self._metrics,), np.array([*self._metrics.values()]).T.tobytes()

    def _narrow(self, rule: CatalogueRule[Any], rows: StepRows) -> bool:
        """Add the bounds of a rule. Return false if the rule has none that contain the last step."""
        bounds = rule.bounds()
        each = bounds if isinstance(bounds, list) else [bounds]
        if not isinstance(rule, LocatedRule):
            return all(self._narrow_metric(one, rows) for one in each)
        slots = rule.slots_of(self._locations.all)
        is_read = (slots >= 0).any()
        return all(
            self._narrow_metric(one, rows)
            if one is not None and one.name in (*METRICS, RELATIONS)
            else not is_read or self._narrow_statistic(one, slots, rows)
            for one in each
        )

    def _narrow_metric(self, bounds: Bounds | None, rows: StepRows) -> bool:
        if bounds is None:
            return False
        value = values_of(rows).get(bounds.name)
        # Rows of relations of one step say nothing about the next one: a relation has one row for each location.
        if value is not None and not bounds.low <= value <= bounds.high and bounds.name != RELATIONS:
            return False
        low, high = self._metrics.get(bounds.name, (-math.inf, math.inf))
        self._metrics[bounds.name] = max(low, float(bounds.low)), min(high, float(bounds.high))
        self._left, self._last = min(self._left, bounds.steps), min(self._last, bounds.last)
        return True

    def _narrow_statistic(self, bounds: Bounds | None, slots: IndexArray, rows: StepRows) -> bool:
        if bounds is None or bounds.name not in ALL:
            return False
        low, high = (
            np.where(slots < 0, 0.0, bound[slots] if isinstance(bound, np.ndarray) else bound) for bound in bounds[1:3]
        )
        low[slots < 0], high[slots < 0] = -math.inf, math.inf
        values, at = rows.counts(bounds.name), rows.layout.numbers
        if ((values < low[at]) | (values > high[at])).any():
            return False
        self._last = min(self._last, bounds.last)
        column = ALL.index(bounds.name)
        self._low[:-1, column] = np.maximum(self._low[:-1, column], low)
        self._high[:-1, column] = np.minimum(self._high[:-1, column], high)
        return True


def _listed(column: Callable[[str], FloatArray], rule: str, of: CatalogueRule[Any]) -> Callable[[str], FloatArray]:
    listed = of.remembered()

    def listed_column(name: str) -> FloatArray:
        if name not in listed:
            message = f"its method remember reads the statistic {name!r}, but remembered returns only {[*listed]}"
            raise HookError(f"rules.{rule}: {message}")
        return column(name)

    return listed_column


def values_of(rows: StepRows) -> Mapping[str, Any]:
    """Return the metrics of a step, with the numbers of its targets and of its rows of relations if there are any."""
    if rows.metrics is not None and not (rows.relations or len(rows.targets)):
        return rows.metrics
    return {**(rows.metrics or {}), TARGETS: len(rows.targets), RELATIONS: len(rows.relations)}
