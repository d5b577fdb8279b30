"""Converts the rows of the recorder, on the host, to the rows that rules read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ..rules.rule_set import RuleSet
from ..rules.step_rows import FloatArray, RelationRow, RowLayout, RowSite, StepRows, time_order
from ..tables.schemas import IDENTITY, MOMENT
from ..tables.sink_interface import Row
from .recorder import MetricsRow
from .samples import SampleRows
from .slab_rows import StatisticsRows

_Moment = tuple[int, str]
_SITE_COLUMNS = [column.name for column in IDENTITY[len(MOMENT) - 1 :]]  # the rank is not part of the moment of a row
_HOOK, _RECOMPUTE = _SITE_COLUMNS.index("hook"), _SITE_COLUMNS.index("recompute")


def update_rules(
    rules: RuleSet,
    stats: StatisticsRows | None,
    metrics: Sequence[MetricsRow],
    samples: Sequence[SampleRows],
    relations: Mapping[_Moment, Sequence[RelationRow]],
) -> None:
    """Pass the rows of each step and phase to the rules, in order."""
    metrics_by_step: dict[_Moment, Mapping[str, Any]] = {(step, phase): row for step, phase, row in metrics}
    targets = _targets(samples) if samples else {}
    indices = {} if stats is None else _indices(stats)
    moments = {**metrics_by_step, **indices, **targets, **relations}
    for step, phase in moments if len(moments) == 1 else sorted(moments, key=time_order):
        moment = step, phase
        layout, statistic, numbers = _statistics(rules, phase, stats, indices.get(moment, _NO_ROWS))
        metrics_row, targets_of_step = metrics_by_step.get(moment), targets.get(moment)
        of_step = relations.get(moment, ())
        rules.update(
            StepRows(step, phase, layout, statistic, metrics_row, targets_of_step, numbers=numbers, relations=of_step)
        )


def _targets(samples: Sequence[SampleRows]) -> dict[_Moment, FloatArray]:
    """Return the targets of each step and phase with any."""
    targets: dict[_Moment, list[float]] = {}
    for batch in samples:
        if len(batch.targets):
            step, _, _, phase, *_ = batch[0]
            targets.setdefault((step, phase), []).extend(batch.targets)
    return {moment: np.array(numbers, np.float64) for moment, numbers in targets.items()}


def _indices(stats: StatisticsRows) -> dict[_Moment, list[int] | None]:
    """Return the rows of each step and phase; None for all rows."""
    if stats.moment is not None:
        return {(stats.moment.step, stats.moment.phase): None}
    groups: dict[_Moment, list[int] | None] = {}
    for row, moment in enumerate(stats.taken.moments_of_rows):
        groups.setdefault((moment.step, moment.phase), []).append(row)  # type: ignore[union-attr]
    return groups


_NO_ROWS: list[int] = []
_Numbers = tuple[Sequence[int], FloatArray]
_NO_NUMBERS: _Numbers = ((), np.empty((0, 0)))


def _statistics(
    rules: RuleSet, phase: str, stats: StatisticsRows | None, rows: list[int] | None
) -> tuple[RowLayout, Callable[[str], FloatArray], _Numbers]:
    """Return the layout and the statistics of some rows. None selects all rows."""
    if stats is None or rows is _NO_ROWS:
        return rules.layout(_NO_ROWS, phase, _site), lambda name: np.empty(0), _NO_NUMBERS
    statistics, numbers = stats.layout.built_in, stats.values[0]
    if rows is None:
        return rules.layout(stats.sites, phase, _site), stats.column, (statistics, numbers)
    sites = [stats.sites[row] for row in rows]
    return rules.layout(sites, phase, _site), lambda name: stats.column(name)[rows], (statistics, numbers[:, rows])


def _site(row: Row) -> RowSite:
    hook, layer, module_type, kind, role, path = row[_HOOK : _HOOK + 6]
    return RowSite(hook, layer, module_type, kind, role, path, row[_RECOMPUTE])
