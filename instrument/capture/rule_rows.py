"""Converts the rows of the recorder, on the host, to the rows that rules read. Rows of several steps are kept and read together."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..rules.deferral import MOST_ROWS, MOST_STEPS
from ..rules.rule_set import RuleSet
from ..rules.step_rows import Column, FloatArray, Site, StepRows, time_order
from ..spec.schedule import STEP_PHASES
from .recorder import MetricsRow
from .rule_actions import RuleActions
from .samples import SampleRows
from .sink_interface import Row
from .step_statistics import StatisticsRows
from .tables import IDENTITY, MOMENT

_SITE_COLUMNS = [column.name for column in IDENTITY[len(MOMENT) - 1 :]]  # the rank is not part of the moment of a row
MOST_SECONDS = 0.2  # maximum delay of a warning after its step, or one step if that is longer
_NO_ROWS: list[Any] = []
_HOOK, _RECOMPUTE = _SITE_COLUMNS.index("hook"), _SITE_COLUMNS.index("recompute")


class RuleRows:
    """Keeps the rows of some steps, and passes them to the rules together.

    It passes them when there are many rows, when `MOST_SECONDS` are over, after an evaluation, and when a loss is not finite. It
    keeps no rows if a rule does more than warn, or if a rule is custom.

    Args:
        rules: The rules.
        actions: The actions of the rules that fired.
    """

    def __init__(self, rules: RuleSet, actions: RuleActions) -> None:
        self.rules = rules
        self.actions = actions
        self._keeps = not actions.are_needed and not rules.has_custom_rules
        self._kept: list[tuple[StatisticsRows | None, Sequence[MetricsRow], Sequence[SampleRows]]] = []
        self._count = 0  # of rows and samples
        self._ends: deque[tuple[int, int]] = deque(
            maxlen=2
        )  # the last ends of steps: the number of kept items, and the step
        self._read_at = time.monotonic()

    def add(self, stats: StatisticsRows | None, metrics: Sequence[MetricsRow], samples: Sequence[SampleRows]) -> None:
        """Add the rows of a step or evaluation."""
        self._kept.append((stats, metrics, samples))
        self._count += 0 if stats is None else len(stats.sites)
        for batch in samples:
            self._count += len(batch)
        is_due = len(self._kept) >= MOST_STEPS or self._count >= MOST_ROWS
        if not self._keeps or is_due or time.monotonic() - self._read_at > MOST_SECONDS or not _is_usual(metrics):
            self.read()

    def end_step(self, step: int) -> None:
        """Carry out the actions of the rules that fired since the last call; see `RuleActions.act`."""
        if self._keeps:
            self._ends.append((len(self._kept), step))
        else:
            self.actions.act(step)

    def read(self) -> bool:
        """Pass the kept rows to the rules. Return whether there were any."""
        kept, self._kept, self._count = self._kept, [], 0
        ends, self._ends = self._ends, deque(maxlen=2)
        begin = 0
        for end, step in ends:
            self._pass(kept[begin:end])
            self.actions.act(step)
            begin = end
        self._pass(kept[begin:])
        self._read_at = time.monotonic()
        return bool(kept)

    def _pass(self, kept: Sequence[tuple[StatisticsRows | None, Sequence[MetricsRow], Sequence[SampleRows]]]) -> None:
        if kept:
            self.rules.update([rows for item in kept for rows in step_rows(self.rules, *item)])


def _is_usual(metrics: Sequence[MetricsRow]) -> bool:
    """Return whether all metrics are those of steps, not of an evaluation, and every loss is finite."""
    for _, phase, row in metrics:
        loss = row["loss"]
        if phase not in STEP_PHASES or (loss is not None and not math.isfinite(loss)):
            return False
    return True


def step_rows(
    rules: RuleSet, stats: StatisticsRows | None, metrics: Sequence[MetricsRow], samples: Sequence[SampleRows]
) -> Iterator[StepRows]:
    """Yield the rows of each step and phase, in order.

    Args:
        rules: The rules, which know the layouts of earlier steps.
        stats: The statistics; None without any.
        metrics: The rows of metrics.
        samples: The samples of each batch.
    """
    if len(metrics) == 1 and not samples and stats is not None and stats.moment is not None:
        step, phase, row = metrics[0]
        if (step, phase) == (stats.moment.step, stats.moment.phase):  # most steps
            layout = rules.layout(stats.sites, phase, _site)
            yield StepRows(step, phase, layout, stats.column, row, numbers=stats.numbers, has_others=stats.has_others)
            return
    metrics_by_step: dict[tuple[int, str], Mapping[str, Any]] = {(step, phase): row for step, phase, row in metrics}
    targets: dict[tuple[int, str], list[float]] = {}
    for batch in samples:
        if len(batch.targets):
            step, _, _, phase, *_ = batch[0]
            targets.setdefault((step, phase), []).extend(batch.targets)
    indices = {} if stats is None else _indices(stats)
    for step, phase in sorted({*indices, *metrics_by_step, *targets}, key=time_order):
        sites, column, numbers = _selected(stats, indices.get((step, phase), _NO_ROWS))
        yield StepRows(
            step,
            phase,
            rules.layout(sites, phase, _site),
            column,
            metrics_by_step.get((step, phase)),
            np.array(targets[step, phase], np.float64) if (step, phase) in targets else None,
            numbers=numbers,
            has_others=stats is not None and stats.has_others,
        )


def _indices(stats: StatisticsRows) -> dict[tuple[int, str], list[int] | None]:
    """Return the rows of each step and phase; None for all rows."""
    if stats.moment is not None:
        return {(stats.moment.step, stats.moment.phase): None}
    groups: dict[tuple[int, str], list[int] | None] = {}
    for row, moment in enumerate(stats.moments):
        groups.setdefault((moment.step, moment.phase), []).append(row)  # type: ignore[union-attr]
    return groups


def _selected(stats: StatisticsRows | None, rows: list[int] | None) -> tuple[Sequence[Row], Column, FloatArray | None]:
    """Return the identity of some rows, and their statistics. None selects all rows."""
    if stats is None or rows is _NO_ROWS:
        return _NO_ROWS, _no_rows, None
    if rows is None:
        return stats.sites, stats.column, stats.numbers
    index = np.array(rows)
    return [stats.sites[row] for row in rows], lambda name: stats.column(name)[index], stats.numbers[index]


def _no_rows(name: str) -> FloatArray:  # noqa: ARG001
    return np.empty(0)


def _site(row: Row) -> Site:
    hook, layer, module_type, kind, role, path = row[_HOOK : _HOOK + 6]
    return Site(hook, layer, module_type, kind, role, path, row[_RECOMPUTE])
