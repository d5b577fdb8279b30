"""Converts the rows of the recorder, on the host, to the rows that rules read. Rows of several steps are kept and read together."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..rules.deferral import MOST_ROWS, MOST_STEPS
from ..rules.rule_set import RuleSet
from ..rules.step_rows import Columns, FloatArray, Site, Statistics, StepBlock, time_order
from ..spec.schedule import STEP_PHASES
from ..spec.tables import IDENTITY, MOMENT
from .recorder import MetricsRow
from .rule_actions import RuleActions
from .samples import SampleRows
from .sink_interface import Row
from .step_statistics import StatisticsRows

_Targets = Mapping[tuple[int, str], FloatArray]
_SITE_COLUMNS = [column.name for column in IDENTITY[len(MOMENT) - 1 :]]  # the rank is not part of the moment of a row
MOST_SECONDS = 1.0  # maximum delay of a warning after its step, or one step if that is longer
_NO_ROWS: list[Any] = []
_NO_TARGETS: _Targets = {}
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
        self._blocks: list[StepBlock] = []
        self._last: StepBlock | None = None  # the last block, if it can be continued
        self._sites: Sequence[Row] | None = None  # of its rows; None without rows
        self._steps = self._rows = 0  # of all blocks; the samples with targets count as rows
        self._added: tuple[int, str] | None = None  # step and phase of the last rows since the end of a step
        self._ended: tuple[int, str] | None = None  # those of the step or evaluation that ended last
        self._read_at = time.monotonic()

    def add(self, stats: StatisticsRows | None, metrics: Sequence[MetricsRow], samples: Sequence[SampleRows]) -> None:
        """Add the rows of a step or evaluation."""
        targets = _targets(samples) if samples else _NO_TARGETS
        if not self._continue(stats, metrics, targets):
            blocks = [*_single_steps(self.rules, stats, metrics, targets)]
            self._blocks += blocks
            if blocks:
                self._added = blocks[-1].steps[-1], blocks[-1].phase
            self.read()
        elif (
            self._steps >= MOST_STEPS
            or self._rows >= MOST_ROWS
            or not self._keeps
            or time.monotonic() - self._read_at > MOST_SECONDS
        ):
            self.read()

    def _continue(self, stats: StatisticsRows | None, metrics: Sequence[MetricsRow], targets: _Targets) -> bool:
        """Append a training step to a block. Return false if these may be other rows, or if the loss is not finite.

        The block keeps only the numbers of `stats`: more memory that stays in use would make the following steps slower.
        """
        moment = None if stats is None else stats.moment
        row: Mapping[str, Any] | None = None
        is_finite = True
        if len(metrics) == 1:
            step, phase, row = metrics[0]
            loss = row["loss"]
            is_finite = loss is None or -math.inf < loss < math.inf
        elif metrics or moment is None:
            return False
        else:  # another process has the metrics
            step, phase = moment.step, moment.phase
        if phase not in STEP_PHASES or not is_finite or (targets and targets.keys() != {(step, phase)}):
            return False
        targets_of_step = None
        if targets:
            targets_of_step = targets[step, phase]
            self._rows += len(targets_of_step)
        block = self._last
        if stats is None:
            if block is None or phase != block.phase:
                block = self._begin(phase)
            block.append(step, row, targets_of_step)
        else:
            if moment is None or moment.step != step or moment.phase != phase:
                return False
            if block is None or phase != block.phase or stats.sites is not self._sites:
                block = self._begin(phase, stats.sites)
            block.append(step, row, targets_of_step, stats.numbers, stats if stats.has_others else None)
            self._rows += len(stats.sites)
        self._steps += 1
        self._added = step, phase
        return True

    def _begin(self, phase: str, sites: Sequence[Row] | None = None) -> StepBlock:
        """Begin a block, or add the sites of rows to a block without rows."""
        block = self._last
        if block is None or phase != block.phase or self._sites is not None:
            block = StepBlock(phase, self.rules.layout(_NO_ROWS, phase, _site))
            self._blocks.append(block)
        if sites is not None:
            block.layout = self.rules.layout(sites, phase, _site)
        self._last, self._sites = block, sites
        return block

    def end_step(self, step: int) -> None:
        """Carry out the actions of the rules that fired since the last call; see `RuleActions.act`."""
        self._ended, self._added = self._added, None
        if not self._keeps:
            self.actions.act(step)

    def read(self) -> bool:
        """Pass the kept rows to the rules. Return whether there were any."""
        blocks, self._blocks, self._last, self._sites = self._blocks, [], None, None
        self._steps = self._rows = 0
        self.rules.update(blocks)
        if self._keeps:
            self.actions.fired = self.rules.fired_at(self._ended)
            self.rules.take_fired()  # nothing follows
        self._read_at = time.monotonic()
        return bool(blocks)


def _single_steps(
    rules: RuleSet, stats: StatisticsRows | None, metrics: Sequence[MetricsRow], targets: _Targets
) -> Iterator[StepBlock]:
    """Yield the rows of each step and phase, in order.

    Args:
        rules: The rules, which know the layouts of earlier steps.
        stats: The statistics; None without any.
        metrics: The rows of metrics.
        targets: The targets of samples by step and phase.
    """
    metrics_by_step: dict[tuple[int, str], Mapping[str, Any]] = {(step, phase): row for step, phase, row in metrics}
    indices = {} if stats is None else _indices(stats)
    for step, phase in sorted({*indices, *metrics_by_step, *targets}, key=time_order):
        sites, statistics = _selected(stats, indices.get((step, phase), _NO_ROWS))
        block = StepBlock(phase, rules.layout(sites, phase, _site))
        row, numbers = metrics_by_step.get((step, phase)), None if statistics is None else statistics.numbers
        block.append(step, row, targets.get((step, phase)), numbers, statistics)
        yield block


def _targets(samples: Sequence[SampleRows]) -> _Targets:
    """Return the targets of each step and phase with any."""
    targets: dict[tuple[int, str], list[float]] = {}
    for batch in samples:
        if len(batch.targets):
            step, _, _, phase, *_ = batch[0]
            targets.setdefault((step, phase), []).extend(batch.targets)
    return {moment: np.array(numbers, np.float64) for moment, numbers in targets.items()}


def _indices(stats: StatisticsRows) -> dict[tuple[int, str], list[int] | None]:
    """Return the rows of each step and phase; None for all rows."""
    if stats.moment is not None:
        return {(stats.moment.step, stats.moment.phase): None}
    groups: dict[tuple[int, str], list[int] | None] = {}
    for row, moment in enumerate(stats.moments):
        groups.setdefault((moment.step, moment.phase), []).append(row)  # type: ignore[union-attr]
    return groups


def _selected(stats: StatisticsRows | None, rows: list[int] | None) -> tuple[Sequence[Row], Statistics | None]:
    """Return the identity of some rows, and their statistics. None selects all rows."""
    if stats is None or rows is _NO_ROWS:
        return _NO_ROWS, None
    if rows is None:
        return stats.sites, stats
    index = np.array(rows)
    columns = Columns(lambda name: stats.column(name)[index], stats.numbers[index])
    return [stats.sites[row] for row in rows], columns


def _site(row: Row) -> Site:
    hook, layer, module_type, kind, role, path = row[_HOOK : _HOOK + 6]
    return Site(hook, layer, module_type, kind, role, path, row[_RECOMPUTE])
