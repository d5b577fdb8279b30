"""The rules of a finished run: they read its tables in the order of the steps, and decide as they did live."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from ..rules.rule import LocatedRule
from ..rules.rule_set import RuleEvent, RuleSet
from ..rules.step_rows import FloatArray, Site, StepRows, time_order
from ..spec.rules import METRIC_NAMES, RuleBase
from ..spec.statistics import ALL
from .run_tables import RunTables

Moment = tuple[int, str]
_COUNTS = ("numel", "nan_count", "inf_count")
_METRICS = (*METRIC_NAMES, "skipped")


def rule_events(run: RunTables, rules: Mapping[str, RuleBase]) -> list[RuleEvent]:
    """Return the events that rules write for the rows of a run in any state. The state of the rules is not kept.

    Each process of a distributed run has its own rows, and so its own rules. The run is read in batches.

    Args:
        run: One run.
        rules: The rules by name.
    """
    events: list[RuleEvent] = []
    frozen_layers = _frozen_layers(run)
    for rank in _ranks(run):
        rule_set = RuleSet(rules, events.append, frozen_layers)
        rule_set.update(_steps(run, rule_set, ds.field("rank") == rank))
    return sorted(events, key=lambda event: event.step)


def _frozen_layers(run: RunTables) -> frozenset[str]:
    """Return the names of the layers whose parameters are all frozen."""
    rows = (row for batch in run.scan("layers", ["layer", "parameters", "trainable"]) for row in batch.to_pylist())
    return frozenset(row["layer"] for row in rows if row["parameters"] and row["trainable"] == 0)


def _ranks(run: RunTables) -> list[int]:
    batches = itertools.chain(run.scan("stats", ["rank"]), run.scan("metrics", ["rank"]))
    return sorted({rank for batch in batches for rank in batch["rank"].unique().to_pylist()})


def _steps(run: RunTables, rules: RuleSet, condition: ds.Expression) -> Iterator[StepRows]:
    """Yield the rows of each step and phase, in order."""
    metrics = {
        (row["step"], row["phase"]): row
        for batch in run.scan("metrics", ["step", "phase", *_METRICS], condition)
        for row in batch.to_pylist()
    }
    targets = _targets(run, condition) if any(spec.source == "samples" for spec in rules.specs.values()) else {}
    left = sorted({*metrics, *targets}, key=time_order)
    no_rows: tuple[list[Site], dict[str, FloatArray]] = ([], {})

    def rows_of(moment: Moment, stats: tuple[list[Site], dict[str, FloatArray]]) -> StepRows:
        sites, columns = stats
        layout = rules.layout(sites, moment[1], lambda site: site)
        missing = np.full(len(sites), np.nan)
        return StepRows(
            *moment, layout, lambda name: columns.get(name, missing), metrics.get(moment), targets.get(moment)
        )

    position = 0
    for moment, stats in _statistics(run, rules, condition):
        while position < len(left) and time_order(left[position]) < time_order(moment):
            yield rows_of(left[position], no_rows)
            position += 1
        position += position < len(left) and left[position] == moment
        yield rows_of(moment, stats)
    for moment in left[position:]:
        yield rows_of(moment, no_rows)


def _statistics(
    run: RunTables, rules: RuleSet, condition: ds.Expression
) -> Iterator[tuple[Moment, tuple[list[Site], dict[str, FloatArray]]]]:
    """Yield the identities of the rows of each step and phase, and the statistics that the rules read."""
    read = {name for rule in rules.rules if isinstance(rule, LocatedRule) for name in rule.statistics}
    columns = sorted({*read, *_COUNTS} & {*ALL, *run.custom_statistics})
    pending: list[tuple[list[Site], dict[str, FloatArray]]] = []
    current: Moment | None = None
    for batch in run.scan("stats", ["step", "phase", *Site._fields, *columns], condition):
        steps, phases = batch["step"].to_numpy(), np.array(batch["phase"].to_pylist(), np.str_)
        sites = [Site(*cells) for cells in zip(*(batch[name].to_pylist() for name in Site._fields), strict=True)]
        numbers = {name: _floats(batch[name]) for name in columns}
        changes = np.flatnonzero((steps[1:] != steps[:-1]) | (phases[1:] != phases[:-1])) + 1
        for begin, end in itertools.pairwise([0, *changes.tolist(), len(steps)]):
            if begin == end:
                continue
            moment = (int(steps[begin]), str(phases[begin]))
            if current is not None and moment != current:
                yield current, _joined(pending)
                pending = []
            current = moment
            pending.append((sites[begin:end], {name: values[begin:end] for name, values in numbers.items()}))
    if current is not None:
        yield current, _joined(pending)


def _joined(parts: Sequence[tuple[list[Site], dict[str, FloatArray]]]) -> tuple[list[Site], dict[str, FloatArray]]:
    if len(parts) == 1:
        return parts[0]
    names = parts[0][1]
    sites = [site for part, _ in parts for site in part]
    return sites, {name: np.concatenate([numbers[name] for _, numbers in parts]) for name in names}


def _targets(run: RunTables, condition: ds.Expression) -> dict[Moment, FloatArray]:
    """Return the targets of the samples of each step and phase that has any."""
    found: dict[Moment, list[Any]] = {}
    for batch in run.scan("samples", ["step", "phase", "target"], condition & ds.field("target_dtype").is_valid()):
        cells = zip(batch["step"].to_pylist(), batch["phase"].to_pylist(), _floats(batch["target"]), strict=True)
        for step, phase, target in cells:
            found.setdefault((step, phase), []).append(target)
    return {moment: np.array(values) for moment, values in found.items()}


def _floats(column: pa.Array) -> FloatArray:
    """Return a column as float64, with NaN for null."""
    values: FloatArray = column.cast(pa.float64()).to_numpy(zero_copy_only=False)
    return values
