"""The rules of a finished run: they read its tables in the order of the steps, and decide as they did live."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping, Sequence, Set
from operator import itemgetter
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from ..config.rules import METRIC_NAMES, RuleBase
from ..config.run_changes import Settings
from ..rules.rule import CatalogueRule, LocatedRule
from ..rules.rule_set import RuleEvent, RuleSet
from ..rules.step_rows import FloatArray, RelationRow, RowSite, StepRows, time_order
from ..tables.kinds import KINDS
from ..tables.schemas import IDENTITY, joined_table
from ..tables.statistics import ALL
from .frames import floats
from .run_tables import RunTables

Moment = tuple[int, str]
_Rows = tuple[list[RowSite], dict[str, FloatArray]]
_BATCH = ("step", "phase", "micro_step")
_COUNTS = ("numel", "nan_count", "inf_count")
_IDENTITY = tuple(column.name for column in IDENTITY)
_METRICS = (*METRIC_NAMES, "skipped")


def rule_events(run: RunTables, rules: Mapping[str, RuleBase]) -> list[RuleEvent]:
    """Return the events that rules write for the rows of a run in any state. The state of the rules is not kept.

    Each process of a distributed run has its own rows, and so its own rules. The run is read in batches.
    """
    events: list[RuleEvent] = []
    layers = (row for batch in run.scan("layers", ["layer", "parameters", "trainable"]) for row in batch.to_pylist())
    frozen_layers = frozenset(row["layer"] for row in layers if row["parameters"] and row["trainable"] == 0)
    batches = itertools.chain.from_iterable(run.scan(table, ["rank"]) for table in ("stats", "metrics", "relations"))
    for rank in sorted({rank for batch in batches for rank in batch["rank"].unique().to_pylist()}):
        rule_set = RuleSet(rules, events.append, frozen_layers)
        if rank == 0:
            rule_set.set_settings(settings_of(run))
        for rows in _steps(run, rule_set, ds.field("rank") == rank):
            rule_set.update(rows)
    return sorted(events, key=lambda event: event.step)


def settings_of(run: RunTables) -> dict[str, dict[str, str]]:
    """Return the settings of each module by its name, with its type; empty for a run of an earlier version."""
    rows = (row for batch in run.scan("layers", ["layer", "module_type", "settings"]) for row in batch.to_pylist())
    known = (row for row in rows if row["settings"] is not None)
    return {row["layer"]: {"type": row["module_type"], **dict(row["settings"])} for row in known}


def _steps(run: RunTables, rules: RuleSet, condition: ds.Expression) -> Iterator[StepRows]:
    metrics = {
        (row["step"], row["phase"]): row
        for batch in run.scan("metrics", ["step", "phase", *_METRICS, *run.custom_metrics], condition)
        for row in batch.to_pylist()
    }
    targets = _targets(run, condition) if any(getattr(rule, "source", "") == "targets" for rule in rules.rules) else {}
    relations: dict[Moment, list[RelationRow]] = {}
    for batch in run.scan("relations", ["step", "phase", *RelationRow._fields], condition):
        for step, phase, *cells in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            relations.setdefault((step, phase), []).append(RelationRow(*cells))
    left = sorted({*metrics, *targets, *relations}, key=time_order)
    no_rows: _Rows = ([], {})
    located = [rule for rule in rules.rules if isinstance(rule, LocatedRule)]
    read = {*_COUNTS, *(name for rule in located for name in (*rule.statistics, *rule.further_statistics))}
    is_listed = all(isinstance(rule, CatalogueRule) for rule in rules.rules)
    if not is_listed:  # custom rules can read any
        read |= {*ALL, *run.custom_statistics}

    def rows_of(moment: Moment, stats: _Rows) -> StepRows:
        sites, columns = stats
        missing = np.full(len(sites), np.nan)
        layout = rules.layout(sites, moment[1], lambda site: site)
        others = metrics.get(moment), targets.get(moment)

        def statistic(name: str) -> FloatArray:
            if is_listed and name not in read:
                raise LookupError(
                    f"neither statistics nor further_statistics of its class names {name!r}, which it reads"
                )
            return columns.get(name, missing)

        return StepRows(*moment, layout, statistic, *others, relations=relations.get(moment, ()))

    recorded = _statistics(run, read, condition)
    in_order = heapq.merge(recorded, ((each, no_rows) for each in left), key=lambda each: time_order(each[0]))
    for moment, same in itertools.groupby(in_order, key=itemgetter(0)):
        yield rows_of(moment, next(same)[1])  # those with statistics come first


def _statistics(run: RunTables, read: Set[str], condition: ds.Expression) -> Iterator[tuple[Moment, _Rows]]:
    columns = sorted(read & {*ALL, *run.custom_statistics})
    joined = [_JoinedNumber(run, table, name, condition) for name in read if (table := joined_table(name)) is not None]
    identity = _IDENTITY if joined else ("step", "phase", *RowSite._fields)
    pending: dict[Moment, list[pa.RecordBatch]] = {}
    for batch in run.scan("stats", ["position", *identity, *columns], condition):
        steps, phases = batch["step"].to_numpy(), np.array(batch["phase"].to_pylist(), np.str_)
        changes = np.flatnonzero((steps[1:] != steps[:-1]) | (phases[1:] != phases[:-1])) + 1
        for begin, end in itertools.pairwise([0, *changes.tolist(), len(steps)]):
            if begin == end:
                continue
            moment = (int(steps[begin]), str(phases[begin]))
            if pending and moment[0] != next(iter(pending))[0]:
                yield from _rows_of(pending, columns, joined)
                pending = {}
            pending.setdefault(moment, []).append(batch.slice(begin, end - begin))
    yield from _rows_of(pending, columns, joined)


class _JoinedNumber:
    """A number of another table than `stats`, read in the order of the steps."""

    def __init__(self, run: RunTables, table: str, name: str, condition: ds.Expression) -> None:
        self.name = name
        names = (*_IDENTITY, name)
        batches = run.scan(table, names, condition)
        rows = (row for batch in batches for row in zip(*(batch[each].to_pylist() for each in names), strict=True))
        self._steps = itertools.groupby(rows, lambda row: row[0])
        self._step, self._numbers = -1, dict[tuple[Any, ...], Any]()

    def of_rows(self, rows: pa.Table) -> FloatArray:
        """Return the numbers of the tensors of rows of a step, float64 [rows]; NaN for no number."""
        step = rows["step"][0].as_py()
        while self._step < step:
            self._step, found = next(self._steps, (step, ()))
            self._numbers = {row[:-1]: row[-1] for row in found}
        if self._step > step or not self._numbers:
            return np.full(len(rows), np.nan)
        identities = zip(*(rows[each].to_pylist() for each in _IDENTITY), strict=True)
        return np.array([self._numbers.get(each) for each in identities], np.float64)


def _rows_of(
    step: Mapping[Moment, list[pa.RecordBatch]], columns: Sequence[str], joined: Sequence[_JoinedNumber]
) -> Iterator[tuple[Moment, _Rows]]:
    """Yield the rows of each phase of a step, in the order in which they were recorded."""
    for moment in sorted(step, key=time_order):
        rows = pa.Table.from_batches(step[moment])
        if len(step[moment]) > 1:
            rows = rows.take(pc.sort_indices(rows["position"]))
        sites = [RowSite(*cells) for cells in zip(*(rows[name].to_pylist() for name in RowSite._fields), strict=True)]
        values = {name: floats(rows[name]) for name in columns}
        for each in joined:  # a custom statistic may have the same name
            numbers = each.of_rows(rows)
            values[each.name] = np.where(np.isnan(numbers), values.get(each.name, np.nan), numbers)
        yield moment, (sites, values)


def _targets(run: RunTables, condition: ds.Expression) -> dict[Moment, FloatArray]:
    """Return the targets of each step and phase, without those that were written late, which the rules did not read live."""
    targets: dict[Moment, list[Any]] = {}
    in_time = _batches_in_time(run, condition)
    for batch in run.scan("samples", [*_BATCH, "target"], condition & ds.field("target_dtype").is_valid()):
        batches = zip(*(batch[name].to_pylist() for name in _BATCH), strict=True)
        for key, target in zip(batches, floats(batch["target"]), strict=True):
            if in_time is None or key in in_time:
                targets.setdefault(key[:2], []).append(target)
    return {moment: np.array(values) for moment, values in targets.items()}


def _batches_in_time(run: RunTables, condition: ds.Expression) -> set[tuple[int, str, int]] | None:
    """Return the batches whose tensors were written in their step; None for all batches."""
    config = run.info.get("config") or {}
    keeping = [name for name, spec in Settings.of(config).hooks.items() if spec.get("keep") is not None]
    if not keeping or (config.get("data") or {}).get("ids") == "all":
        return None
    kinds = [kind.name for kind in KINDS.values() if kind.frequency == "micro_step"]
    others = ds.field("kind").isin(kinds) & ~ds.field("hook").isin(keeping)
    scanned = run.scan("tensors", _BATCH, condition & others)
    return {key for batch in scanned for key in zip(*(batch[name].to_pylist() for name in _BATCH), strict=True)}
