"""The rows of a step as rules see them, from the recorder's rows on the host."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..rules.rule_set import RuleSet
from ..rules.step_rows import Column, FloatArray, Site, StepRows, time_order
from .recorder import MetricsRow
from .samples import SampleRows
from .sink_interface import Row
from .step_statistics import StatisticsRows
from .tables import IDENTITY, MOMENT

_SITE_COLUMNS = [column.name for column in IDENTITY[len(MOMENT) - 1 :]]  # the rank is not part of the moment of a row
_HOOK, _RECOMPUTE = _SITE_COLUMNS.index("hook"), _SITE_COLUMNS.index("recompute")


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
    metrics_by_step: dict[tuple[int, str], Mapping[str, Any]] = {(step, phase): row for step, phase, row in metrics}
    targets: dict[tuple[int, str], list[float]] = {}
    for batch in samples:
        if len(batch.targets):
            step, _, _, phase, *_ = batch[0]
            targets.setdefault((step, phase), []).extend(batch.targets)
    indices = {} if stats is None else _indices(stats)
    for step, phase in sorted({*indices, *metrics_by_step, *targets}, key=time_order):
        sites, column, numbers = _selected(stats, indices.get((step, phase), []))
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
    first = stats.moments[0]
    if stats.moments.count(first) == len(stats):
        return {(first.step, first.phase): None}
    groups: dict[tuple[int, str], list[int] | None] = {}
    for row, moment in enumerate(stats.moments):
        groups.setdefault((moment.step, moment.phase), []).append(row)  # type: ignore[union-attr]
    return groups


def _selected(stats: StatisticsRows | None, rows: list[int] | None) -> tuple[Sequence[Row], Column, FloatArray | None]:
    """Return the identity of some rows, and their statistics. None selects all rows."""
    if stats is None or rows == []:
        return [], _no_rows, None
    if rows is None:
        return stats.sites, stats.column, stats.numbers
    index = np.array(rows)
    return [stats.sites[row] for row in rows], lambda name: stats.column(name)[index], stats.numbers[index]


def _no_rows(name: str) -> FloatArray:  # noqa: ARG001
    return np.empty(0)


def _site(row: Row) -> Site:
    hook, layer, module_type, kind, role, path = row[_HOOK : _HOOK + 6]
    return Site(hook, layer, module_type, kind, role, path, row[_RECOMPUTE])
