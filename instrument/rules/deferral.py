"""Deferral of steps in which most rules certainly do not fire. These rules read many such steps at once, later.

Most steps of a training are similar to the steps before them. One comparison of the statistics of many steps with bounds finds
these steps.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..spec.schedule import STEP_PHASES
from ..spec.statistics import ALL
from .rule import CatalogueRule, LocatedRule, Rule
from .step_rows import TARGETS, BoolArray, FloatArray, IndexArray, Layout, Locations, QuietSteps, StepBlock, StepRows

MOST_STEPS, MOST_ROWS = 256, 10_000  # the memory of deferred steps is bounded
FIRST_STEPS = 32  # number of steps until the first check whether an immediate rule can be deferred again
MOST_LAYOUTS = 64
_FINITE = (-sys.float_info.max, sys.float_info.max)


class _RowBounds(NamedTuple):
    """The bounds of the rows of a layout: float64 [rows, statistics of the kernel], and [rows] for each other statistic."""

    low: FloatArray
    high: FloatArray
    others: list[tuple[str, FloatArray, FloatArray]]


class DeferredSteps:
    """Decides which steps are deferred for which rules, and passes the deferred steps to these rules.

    Args:
        rules: All rules by name.
        locations: The locations of the run.

    Attributes:
        immediate: The rules that read each step at once, by name.
    """

    def __init__(self, rules: Mapping[str, Rule], locations: Locations) -> None:
        self.immediate = rules
        self._rules = rules
        self._locations = locations
        self._tables: list[tuple[Layout, list[FloatArray]]] = []  # the numbers of deferred steps with rows
        self._losses: list[float] = []  # of deferred training steps
        self._steps = self._rows = 0  # of all deferred steps
        self._waiting: list[
            CatalogueRule[Any]
        ] = []  # the rules for which steps are deferred, if these change their state
        self._left = 0  # for how many further steps the bounds hold
        self._patience = FIRST_STEPS
        self._locations_read = 0  # how many locations the rules know
        self._statistics: dict[str, tuple[FloatArray, FloatArray]] = {}  # bounds, [locations]
        self._metrics: dict[str, tuple[float, float]] = {}  # bounds
        self._of_layout: dict[Layout, _RowBounds] = {}

    def accept(self, block: StepBlock, begin: int, end: int) -> int:
        """Defer the first steps that are within all bounds, and return their number. Only the immediate rules have to read them now.

        Args:
            block: Steps.
            begin: The index of the first step.
            end: The index after the last step.
        """
        count = self._count_quiet_metrics(block, begin, min(end, begin + self._left))
        first, last = (bisect_left(block.with_rows, at) for at in (begin, begin + count))
        if first < last:
            numbers = np.concatenate(block.numbers[first:last])
            numbers = numbers.reshape(last - first, len(block.layout), -1)
            within = self._count_within(block, first, numbers)
            if within:
                self._keep(block.layout, numbers[:within])
            if within < last - first:
                count = block.with_rows[first + within] - begin
        if block.phase == "train":
            metrics = block.metrics[begin : begin + count]
            self._losses += [float(row["loss"]) for row in metrics if row is not None and row["loss"] is not None]
        self._left -= count
        self._steps += count
        if self._steps >= MOST_STEPS or self._rows >= MOST_ROWS:
            self.catch_up()
        return count

    def _count_quiet_metrics(self, block: StepBlock, begin: int, end: int) -> int:
        """Return how many of the first steps are no evaluations and have metrics within their bounds."""
        if block.phase not in STEP_PHASES or not block.is_readable:
            return 0
        for name, (low, high) in self._metrics.items():
            if name == TARGETS:
                values: list[Any] = [0 if each is None else len(each) for each in block.targets[begin:end]]
            else:
                values = [None if row is None else row.get(name) for row in block.metrics[begin:end]]
            numbers = np.array(values, np.float64)
            outside = np.flatnonzero(~((numbers >= low) & (numbers <= high)))  # also NaN
            end = next((begin + at for at in outside.tolist() if values[at] is not None), end)
        return end - begin

    def _count_within(self, block: StepBlock, first: int, numbers: FloatArray) -> int:
        """Return how many of the first steps with rows are within the bounds.

        Args:
            block: The steps.
            first: The number of steps with rows before the first one.
            numbers: Their statistics of the kernel, float64 [steps, rows, statistics].
        """
        if block.layout.numbers.max() >= self._locations_read:
            return 0
        bounds = self._bounds_of(block.layout, numbers.shape[2])
        outside = [_is_outside(numbers, bounds.low, bounds.high)]
        others = block.others[first : first + len(numbers)]
        for name, low, high in bounds.others if any(each is not None for each in others) else ():
            values = [np.full(len(block.layout), np.nan) if each is None else each.column(name) for each in others]
            outside.append(_is_outside(np.stack(values), low, high))
        return min(_count_until_any(each) for each in outside)

    def _bounds_of(self, layout: Layout, width: int) -> _RowBounds:
        """Return the bounds of the rows of a layout.

        Args:
            layout: The layout.
            width: The number of statistics of the kernel, the first ones of `ALL`.
        """
        found = self._of_layout.get(layout)
        if found is None:
            low, high = np.full((2, len(layout), width), -np.inf)
            high[:] = np.inf
            others = []
            for name, bounds in self._statistics.items():
                low_of_rows, high_of_rows = (bound[layout.numbers] for bound in bounds)
                if name in ALL[:width]:
                    low[:, ALL.index(name)], high[:, ALL.index(name)] = low_of_rows, high_of_rows
                else:
                    others.append((name, low_of_rows, high_of_rows))
            if len(self._of_layout) >= MOST_LAYOUTS:
                self._of_layout.clear()
            found = self._of_layout[layout] = _RowBounds(low, high, others)
        return found

    def _keep(self, layout: Layout, numbers: FloatArray) -> None:
        if not self._tables or self._tables[-1][0] is not layout:
            self._tables.append((layout, []))
        self._tables[-1][1].append(numbers)
        self._rows += numbers.shape[0] * numbers.shape[1]

    def catch_up(self) -> None:
        """Pass the deferred steps to the rules that have not read them."""
        if self._steps:
            tables = [(layout, np.concatenate(numbers)) for layout, numbers in self._tables]
            steps = QuietSteps(self._losses, tables)
            self._tables, self._losses, self._steps, self._rows = [], [], 0, 0
            for rule in self._waiting:
                rule.advance(steps)

    def plan(self, rows: StepRows) -> None:
        """Decide which of the next steps can be deferred.

        A rule whose bounds do not hold in this step is immediate: it reads each of the next steps at once.

        Args:
            rows: A step that all rules have read.
        """
        self._left, self._of_layout = 0, {}
        previous, self.immediate = {*self.immediate}, self._rules
        if not rows.is_readable:
            return
        self._locations_read, self._statistics, self._metrics = len(self._locations.all), {}, {"loss": _FINITE}
        for name in ("nan_count", "inf_count"):
            self._limit(name, slice(None), -math.inf, 0.0)
        self.immediate, self._waiting, self._left = {}, [], sys.maxsize
        for name, rule in self._rules.items():
            if not isinstance(rule, CatalogueRule) or not self._defer(rule, rows):
                self.immediate[name] = rule
            elif type(rule).advance is not CatalogueRule.advance:
                self._waiting.append(rule)
        if self.immediate:
            self._patience = 2 * self._patience if {*self.immediate} == previous else FIRST_STEPS
            self._left = min(self._left, self._patience)

    def _defer(self, rule: CatalogueRule[Any], rows: StepRows) -> bool:
        """Add the bounds of a rule. Return false if the rule has to read each step at once."""
        if isinstance(rule, LocatedRule):
            return self._defer_located(rule, rows)
        bounds = rule.quiet_bounds(rows)
        if bounds is None:
            return False
        value = _metric(rows, bounds.name)
        if value is not None and not bounds.low <= value <= bounds.high:
            return False
        low, high = self._metrics.get(bounds.name, (-math.inf, math.inf))
        self._metrics[bounds.name] = (max(low, float(bounds.low)), min(high, float(bounds.high)))
        self._left = min(self._left, bounds.steps)
        return True

    def _defer_located(self, rule: LocatedRule[Any], rows: StepRows) -> bool:
        """Add the bounds of a rule on a statistic."""
        slots = rule.slots_of(self._locations.all)
        numbers = np.flatnonzero(slots >= 0)
        bounds = rule.quiet_bounds(rows)
        if bounds is None or not len(numbers):
            return not len(numbers)
        chosen = rule.choose(rows.layout)
        if chosen is not None:
            at = chosen.slots if chosen.index is None else chosen.slots[chosen.index]
            values = rows.counts(bounds.name)[chosen.rows]
            if _is_outside(values, _at(bounds.low, at), _at(bounds.high, at)).any():
                return False
        at = slots[numbers]
        self._limit(bounds.name, numbers, _at(bounds.low, at), _at(bounds.high, at))
        return True

    def _limit(
        self, statistic: str, at: IndexArray | slice, lower: float | FloatArray, upper: float | FloatArray
    ) -> None:
        """Narrow the bounds of a statistic at some locations."""
        unlimited = np.full((2, self._locations_read), [[-math.inf], [math.inf]])
        low, high = self._statistics.setdefault(statistic, (unlimited[0], unlimited[1]))
        low[at], high[at] = np.maximum(low[at], lower), np.minimum(high[at], upper)


def _metric(rows: StepRows, name: str) -> float | None:
    return len(rows.targets) if name == TARGETS else rows.metric(name)


def _at(bound: float | FloatArray, slots: IndexArray) -> float | FloatArray:
    return bound[slots] if isinstance(bound, np.ndarray) else bound


def _is_outside(values: FloatArray, low: float | FloatArray, high: float | FloatArray) -> BoolArray:
    """Return which values are outside of their bounds. NaN is a missing value and never outside."""
    outside: BoolArray = (values < low) | (values > high)
    return outside


def _count_until_any(outside: BoolArray) -> int:
    """Return the index of the first step with any true element, or the number of steps."""
    if not outside.any():
        return len(outside)
    return int(outside.reshape(len(outside), -1).any(axis=1).argmax())
