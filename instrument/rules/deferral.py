"""Steps that some rules read later, many at once, because it is certain that these rules do not fire in them.

Most steps of a training are like the steps before. One comparison of all their statistics with bounds shows that. A rule whose
bounds hold does not have to read the step at once, so a warning is never late.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from ..spec.schedule import STEP_PHASES
from ..spec.statistics import ALL
from .rule import LocatedRule, Rule
from .step_rows import Chosen, FloatArray, IndexArray, Layout, QuietSteps, StepRows

MOST_STEPS, MOST_ROWS = 32, 10_000  # the memory of deferred steps is bounded
_COUNTS = [ALL.index(name) for name in ("nan_count", "inf_count")]


class _ColumnBounds(NamedTuple):
    """The bounds of a statistic that the kernel does not compute."""

    statistic: str
    rows: IndexArray
    low: FloatArray
    high: FloatArray


class DeferredSteps:
    """Decides which steps are deferred, for which rules, and passes them to these rules.

    Args:
        rules: All rules by name.

    Attributes:
        immediate: The rules that read each step at once, by name.
    """

    def __init__(self, rules: Mapping[str, Rule]) -> None:
        self.immediate = rules
        self._rules = rules
        self._steps: list[FloatArray] = []  # the numbers of the deferred steps
        self._rows = 0  # of all deferred steps
        self._latest: StepRows | None = None  # the last step with rows that all rules have read
        self._is_repeated = False  # whether the one before it had the same layout
        self._layout: Layout | None = None  # of the steps that can be deferred; None if there are none
        self._waiting: list[tuple[LocatedRule[Any], Chosen]] = []
        self._low = self._high = np.empty((0, 0))  # [rows, statistics of the kernel]
        self._others: list[_ColumnBounds] = []

    def accept(self, rows: StepRows) -> bool:
        """Return whether only the immediate rules have to read a step now. It is kept for the others."""
        if self._layout is None or len(self._steps) >= MOST_STEPS or self._rows >= MOST_ROWS:
            return False
        loss = rows.metric("loss")
        if rows.phase not in STEP_PHASES or (loss is not None and not math.isfinite(loss)):
            return False
        if len(rows):
            if (
                rows.layout is not self._layout
                or rows.numbers is None
                or not self._is_within_bounds(rows, rows.numbers)
            ):
                return False
            rows.has_non_finite = False
            self._steps.append(rows.numbers)
            self._rows += len(rows)
        return True

    def _is_within_bounds(self, rows: StepRows, numbers: FloatArray) -> bool:
        if (numbers > self._high).any() or (numbers < self._low).any():
            return False
        return not rows.has_others or all(
            _within(rows.counts(each.statistic)[each.rows], each.low, each.high) for each in self._others
        )

    def catch_up(self) -> None:
        """Pass the deferred steps to the rules that have not read them."""
        if self._steps:
            steps = QuietSteps(self._steps)
            self._steps, self._rows = [], 0
            for rule, chosen in self._waiting:
                rule.advance(steps, chosen)

    def plan(self, rows: StepRows) -> None:
        """Decide which of the next steps can be deferred.

        Steps with the layout of the last two steps can. A rule whose bounds do not hold in the last one reads each step at once.

        Args:
            rows: A step that all rules have read.
        """
        self._layout, self.immediate = None, self._rules
        if rows.phase not in STEP_PHASES:
            return
        if len(rows):
            self._is_repeated = self._latest is not None and self._latest.layout is rows.layout
            self._latest = rows
        latest = self._latest
        if latest is None or latest.numbers is None or not self._is_repeated:
            return
        self._layout, self.immediate, self._waiting, self._others = latest.layout, {}, [], []
        self._low, self._high = np.full((2, *latest.numbers.shape), -np.inf)
        self._high[:] = np.inf
        self._high[:, _COUNTS] = 0
        for name, rule in self._rules.items():
            if not isinstance(rule, LocatedRule) or (
                (chosen := rule.choose(latest.layout)) is not None and not self._defer(rule, latest, chosen)
            ):
                self.immediate[name] = rule

    def _defer(self, rule: LocatedRule[Any], rows: StepRows, chosen: Chosen) -> bool:
        """Add the bounds of a rule. Return false if it has to read each step."""
        assert rows.numbers is not None
        bounds = rule.quiet_bounds(rows, chosen)
        if bounds is None:
            return False
        index = np.arange(len(chosen.rows)) if chosen.index is None else chosen.index
        values = rows.counts(bounds.statistic)[chosen.rows]
        low, high = (np.broadcast_to(bound, len(chosen.locations))[index] for bound in (bounds.low, bounds.high))
        if not _within(values, low, high):
            return False
        column = ALL.index(bounds.statistic) if bounds.statistic in ALL else len(ALL)
        if column < rows.numbers.shape[1]:
            self._low[chosen.rows, column] = np.maximum(self._low[chosen.rows, column], low)
            self._high[chosen.rows, column] = np.minimum(self._high[chosen.rows, column], high)
        else:
            self._others.append(_ColumnBounds(bounds.statistic, chosen.rows, low, high))
        if type(rule).advance is not LocatedRule.advance:
            self._waiting.append((rule, chosen))
        return True


def _within(values: FloatArray, low: FloatArray, high: FloatArray) -> bool:
    """Return whether no value is outside of its bounds. NaN, a missing value, is not."""
    return not ((values < low) | (values > high)).any()
