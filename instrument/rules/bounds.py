"""Bounds of the values of a step: one comparison with them shows that most rules cannot fire in it.

Most steps of a training are similar to the steps before them. A rule states the bounds within which it does not fire. It reads a
step outside of them at once. Steps within them are kept, and the rules add them to their state before the next step that they read.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from ..config.schedule import STEP_PHASES
from ..errors import HookError
from ..tables.statistics import ALL
from .reference_ranges import METRICS
from .rule import RELATIONS, TARGETS, Bounds, CatalogueRule, LocatedRule, QuietSteps, Rule
from .step_rows import FloatArray, IndexArray, Locations, Numbers, RowLayout, StepRows

MAX_STEPS, MAX_ROWS = 256, 20_000  # the memory of kept steps is bounded
STEPS_UNTIL_RENEWAL = 128  # if a rule has to read each step: the bounds of the others may then contain its values again
MAX_LAYOUTS = 64
_LARGEST = sys.float_info.max
_NO_NUMBERS: Numbers = ((), np.empty((0, 0)))


try:
    from ..stats.native import numbers_within
# Installed without a C compiler.
except ImportError:

    def numbers_within(  # type: ignore[misc]
        numbers: FloatArray,
        bounds: bytes,
        kept: bytes,
        limits: bytes,
        metrics: Mapping[str, Any],
        names: tuple[str, ...],
    ) -> bytes | None:
        """Return the numbers to keep, float64 [kept, rows]; None if any number or metric is outside of its bounds.

        Args:
            numbers: float64 [statistics, rows]; NaN, a missing value, is within all bounds.
            bounds: float64: for some statistics, the index, a count, as many lowest numbers, and as many highest ones. The count is 1 if
                all rows have the same.
            kept: The indices of the kept statistics, float64.
            limits: The lowest values of metrics and the highest ones, float64 [2, names].
            metrics: The metrics; a missing one is within all limits, NaN is not.
            names: The names of those with limits.
        """
        of_names = zip(map(metrics.get, names), *np.frombuffer(limits).reshape(2, -1).tolist(), strict=True)
        if not all(value is None or least <= value <= most for value, least, most in of_names):
            return None
        left = np.frombuffer(bounds)
        while len(left):
            values, count = numbers[int(left[0])], int(left[1])
            low, high, left = np.split(left[2:], [count, 2 * count])
            if ((values < low) | (values > high)).any():
                return None
        return numbers[np.frombuffer(kept).astype(np.int64)].tobytes()


class _LayoutBounds(NamedTuple):
    """The bounds of the rows of a layout.

    Attributes:
        statistics: The statistics of the numbers, as their indices in `ALL`.
        bounds, kept: See `numbers_within`.
        layout: The layout.
        rows: The number of rows.
    """

    statistics: Sequence[int]
    bounds: bytes
    kept: bytes
    layout: RowLayout
    rows: int


_Kept = tuple[_LayoutBounds, bytes, float | None]
"""A step: its bounds, the numbers that are kept, and the loss of a training step."""


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
        self._of_layout: dict[RowLayout, _LayoutBounds] = {}
        self._kept: list[_Kept] = []
        self._rows = 0  # of all kept steps

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
        of_layout = self._of_layout.get(layout)
        if of_layout is None or of_layout[0] is not statistics:
            of_layout = self._bounds_of(layout, statistics)
        _, bounds, kept, _, count = of_layout
        numbers_to_keep = numbers_within(values, bounds, kept, self._limits, metrics, self._names)
        if numbers_to_keep is None:
            return False
        loss = metrics.get("loss") if phase == "train" else None
        self._kept.append((of_layout, numbers_to_keep, None if loss is None else float(loss)))
        self._left -= 1
        self._rows += count
        if len(self._kept) >= MAX_STEPS or self._rows >= MAX_ROWS:
            self.catch_up()
        return True

    def _bounds_of(self, layout: RowLayout, statistics: Sequence[int]) -> _LayoutBounds:
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
        kept = np.array([index for index, statistic in enumerate(statistics) if ALL[statistic] in read], np.float64)
        packed = np.concatenate([np.empty(0), *parts]).tobytes()
        bounds = self._of_layout[layout] = _LayoutBounds(statistics, packed, kept.tobytes(), layout, len(layout))
        return bounds

    def catch_up(self) -> None:
        """Pass the kept steps to the rules that have not read them.

        Raises:
            HookError: A rule of an installed package reads a statistic that it does not list in `remembered`.
        """
        if self._kept:
            losses = [loss for *_, loss in self._kept if loss is not None]
            groups = groupby((each for each in self._kept if each[0].rows), lambda kept: id(kept[0]))
            tables = [_table([*kept]) for _, kept in groups]
            self._kept, self._rows = [], 0
            for name, rule in self._resting.items():
                read = [(layout, _listed(column, name, rule), of_steps) for layout, column, of_steps in tables]
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


def _table(
    kept: Sequence[_Kept],
) -> tuple[RowLayout, Callable[[str], FloatArray], Sequence[float | None]]:
    statistics, _, indices, layout, rows = kept[0][0]
    names = [ALL[statistics[int(index)]] for index in np.frombuffer(indices)]
    values = np.frombuffer(b"".join(numbers for _, numbers, _ in kept)).reshape(len(kept), len(names), rows)
    losses = [loss for *_, loss in kept]

    def column(name: str) -> FloatArray:
        return values[:, names.index(name)] if name in names else np.full((len(kept), rows), np.nan)

    return layout, column, losses


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
