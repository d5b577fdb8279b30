"""Converts the rows of the recorder, on the host, to the rows that rules read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..config.schedule import STEP_PHASES
from ..rules.rule_set import RuleSet
from ..rules.step_rows import FloatArray, RelationRow, RowSite, StepRows, time_order
from ..tables.schemas import IDENTITY, MOMENT
from ..tables.sink_interface import Row
from .recorder import MetricsRow
from .samples import SampleRows
from .slab_rows import StatisticsRows

_Moment = tuple[int, str]
_SITE_COLUMNS = [column.name for column in IDENTITY[len(MOMENT) - 1 :]]  # the rank is not part of the moment of a row
_Numbers = tuple[Sequence[int], FloatArray]
_NO_ROWS: list[Any] = []
_NO_NUMBERS: _Numbers = ((), np.empty((0, 0)))
_HOOK, _RECOMPUTE = _SITE_COLUMNS.index("hook"), _SITE_COLUMNS.index("recompute")


class _Part(NamedTuple):
    """The rows of a step and phase: all of them, or those before or after an evaluation that interrupts the step."""

    sites: Sequence[Row]
    statistic: Callable[[str], FloatArray]
    numbers: _Numbers | None
    targets: FloatArray | None

    def followed_by(self, other: _Part) -> _Part:
        """Return the rows of two parts together."""
        targets = [each.targets for each in (self, other) if each.targets is not None]
        return _Part(
            [*self.sites, *other.sites],
            lambda name: np.concatenate([self.statistic(name), other.statistic(name)]),
            None,
            np.concatenate(targets) if targets else None,
        )


class RuleRows:
    """Passes the rows of each step and phase to the rules, in order."""

    def __init__(self, rules: RuleSet) -> None:
        self._rules = rules
        self._begun: dict[_Moment, _Part] = {}  # the steps that are not complete

    def __call__(
        self,
        stats: StatisticsRows | None,
        metrics: Sequence[MetricsRow],
        samples: Sequence[SampleRows],
        relations: Mapping[_Moment, Sequence[RelationRow]],
        is_complete: bool,
    ) -> None:
        """Pass rows to the rules. Keep those of a step that is not complete until it is."""
        if is_complete and len(metrics) == 1 and not (samples or relations or self._begun):
            step, phase, row = metrics[0]
            if stats is None or (stats.moment is not None and stats.latest == (step, phase)):  # one complete step
                sites, statistic, numbers = _statistics(stats, None)
                layout = self._rules.layout(sites, phase, _site)
                self._rules.update(StepRows(step, phase, layout, statistic, row, numbers=numbers))
                return
        metrics_by_step: dict[_Moment, Mapping[str, Any]] = {(step, phase): row for step, phase, row in metrics}
        targets = _targets(samples) if samples else {}
        indices = {} if stats is None else _indices(stats)
        moments = {**self._begun, **metrics_by_step, **indices, **targets, **relations}
        for moment in moments if len(moments) == 1 else sorted(moments, key=time_order):
            step, phase = moment
            part = _Part(*_statistics(stats, indices.get(moment, _NO_ROWS)), targets.get(moment))
            if moment in self._begun:
                part = self._begun.pop(moment).followed_by(part)
            if not is_complete and phase in STEP_PHASES:
                self._begun[moment] = part
                continue
            layout, of_step = self._rules.layout(part.sites, phase, _site), relations.get(moment, ())
            given = part.statistic, metrics_by_step.get(moment), part.targets
            self._rules.update(StepRows(step, phase, layout, *given, numbers=part.numbers, relations=of_step))


def _targets(samples: Sequence[SampleRows]) -> dict[_Moment, FloatArray]:
    """Return the targets of each step and phase with any."""
    targets: dict[_Moment, list[FloatArray]] = {}
    for batch in samples:
        if len(batch.targets):
            targets.setdefault((batch.moment.step, batch.moment.phase), []).append(batch.targets)
    return {moment: np.concatenate(parts) for moment, parts in targets.items()}


def _indices(stats: StatisticsRows) -> dict[_Moment, list[int] | None]:
    """Return the rows of each step and phase; None for all rows."""
    if stats.moment is not None:
        return {(stats.moment.step, stats.moment.phase): None}
    groups: dict[_Moment, list[int] | None] = {}
    for row, moment in enumerate(stats.taken.moments_of_rows):
        groups.setdefault((moment.step, moment.phase), []).append(row)  # type: ignore[union-attr]
    return groups


def _statistics(
    stats: StatisticsRows | None, rows: list[int] | None
) -> tuple[Sequence[Row], Callable[[str], FloatArray], _Numbers]:
    """Return the sites and the statistics of some rows. None selects all rows."""
    if stats is None or rows is _NO_ROWS:
        return _NO_ROWS, lambda name: np.empty(0), _NO_NUMBERS
    statistics, numbers = stats.layout.built_in, stats.values
    if rows is None:
        return stats.sites, stats.column, (statistics, numbers)
    return [stats.sites[row] for row in rows], lambda name: stats.column(name)[rows], (statistics, numbers[:, rows])


def _site(row: Row) -> RowSite:
    hook, layer, module_type, kind, role, path = row[_HOOK : _HOOK + 6]
    return RowSite(hook, layer, module_type, kind, role, path, row[_RECOMPUTE])
