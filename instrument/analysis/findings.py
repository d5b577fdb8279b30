"""The most important observations about a run, for the end of a run, the report and notebooks.

What is wrong comes from the rules of the run. The other observations have no thresholds.

Tables are read in batches and with the needed columns only, so that tables may be larger than memory.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from ..config.description import describe_action
from ..config.parse import parse_rules
from ..config.rules import RULES, default_rules
from ..errors import InstrumentError
from ..rules.dead_units import DeadUnits
from ..rules.non_finite import LOSS_NOT_FINITE
from ..rules.rule_set import RuleEvent
from ..rules.saturated_activation import SaturatedActivation
from ..rules.step_rows import location_name
from ..rules.watch import ADVICE as WATCH_ADVICE
from ..tables.kinds import KINDS
from ..tables.reasons import is_incomplete
from .config_comparison import hooks_of
from .finite import REQUIRED_COLUMNS, not_finite_in
from .rule_events import rule_events
from .run_tables import RunTables
from .summary import changed

Severity = Literal["info", "warning", "error"]

FEW = 0.0005  # fraction of elements below which the count is shown instead of the fraction
MAX_NAMES = 4

_IDENTITY = ["step", "hook", "layer", "kind", "role", "path", "phase"]
_Row = dict[str, Any]

RULE_EVENT_COLUMNS = [field.name for field in fields(RuleEvent)]
_RECTIFIERS = ["ReLU", "ReLU6", "Threshold"]  # zeros in their output are inactive units


@dataclass(frozen=True)
class Finding:
    """One observation about a run.

    Attributes:
        when: The step; None if the observation is about the run as a whole.
        severity: `info`, `warning`, or `error` if the training is unusable.
        number: The value as a number, if it is numeric.
        advice: What to do next, in one sentence; empty for an observation that is not a problem.
    """

    what: str
    where: str
    when: int | None
    value: str
    severity: Severity = "info"
    number: float | None = None
    advice: str = ""


def findings(run: RunTables) -> list[Finding]:
    """Return the findings of one run in any state, the most severe ones first.

    Raises:
        InstrumentError: `run` contains several runs.
    """
    if len(run.folders) > 1:
        raise InstrumentError(f"findings require a single run, but {run.path} contains {len(run.folders)} runs")
    judged = [*_rules(run)]
    fired = {finding.what for finding in judged}
    largest = _largest(run)
    sources = (
        ("", _loss(run)),
        ("", _gradients(run, largest.get("l2"))),
        (DeadUnits.what, _fraction(largest, "dead_fraction" if "dead_fraction" in largest else "zero_fraction")),
        (SaturatedActivation.what, _fraction(largest, "saturated_fraction")),
        ("", _not_fired(run)),
        ("", _interventions(run)),
    )
    all_findings = judged + [finding for what, source in sources if what not in fired for finding in source]
    return most_severe_first(all_findings)


def most_severe_first(all_findings: Iterable[Finding]) -> list[Finding]:
    """Return findings with the most severe ones first. Findings of the same severity keep their order."""
    return sorted(all_findings, key=lambda finding: ("error", "warning", "info").index(finding.severity))


def _rules(run: RunTables) -> Iterator[Finding]:
    """Return the findings of the rules."""
    config = run.info.get("config") or {}
    if "rules" in config:
        rules = config["rules"] or {}
        return rule_findings(recorded_events(run, rules), advice_by_rule(rules, run.info))
    return rule_findings(rule_events(run, parse_rules(default_rules())), advice_by_rule(default_rules(), run.info))


def recorded_events(run: RunTables, names: Collection[str]) -> list[RuleEvent]:
    """Return the events that rules wrote during the run, in order."""
    fired = ds.field("rule").isin(pa.array([*names], pa.string())) & ds.field("value").is_valid()
    return [RuleEvent(**row) for batch in run.scan("events", RULE_EVENT_COLUMNS, fired) for row in batch.to_pylist()]


def rule_findings(events: Sequence[RuleEvent], advice: Mapping[str, str]) -> Iterator[Finding]:
    """Yield one finding for each rule that fired: its first event, and how many more there are."""
    groups: dict[tuple[str, bool], list[RuleEvent]] = {}
    for event in events:
        if event.value is not None:
            groups.setdefault((event.rule, event.location is None), []).append(event)
    for group in groups.values():
        event = group[0]
        what, _, value = event.message.split(": ", 2)
        more = f" ({len(group) - 1} more)" if len(group) > 1 else ""
        lost = what == LOSS_NOT_FINITE
        severity: Severity = "error" if lost else "warning" if event.severity == "warning" else "info"
        yield Finding(
            what,
            event.location or event.layer or "training",
            event.step,
            f"{value}{more}",
            severity,
            event.value,
            advice.get(event.rule, ""),
        )


def advice_by_rule(rules: Mapping[str, Any], info: Mapping[str, Any]) -> dict[str, str]:
    """Return what to do next if a rule fires, by its name."""
    entries = {name: entry for name, entry in rules.items() if isinstance(entry, Mapping)}
    of_catalogue = {
        name: RULES[kind].advice for name, entry in entries.items() if (kind := str(entry.get("rule"))) in RULES
    }
    of_watch = {name: WATCH_ADVICE for name, entry in entries.items() if "watch" in entry}
    return {**of_catalogue, **of_watch, **(info.get("advice") or {})}


def _loss(run: RunTables) -> Iterator[Finding]:
    """Yield the first, last and lowest training loss."""
    training = ds.field("phase") == "train"
    steps, losses = _columns(run, "metrics", ["step", "loss"], training & ds.field("loss").is_valid())
    if not len(losses):
        return
    finite = np.isfinite(losses)
    if finite.any():
        finite_losses = np.where(finite, losses, math.inf)
        low = int(finite_losses.argmin())
        value = f"{losses[0]:.4g} -> {losses[-1]:.4g}, lowest {losses[low]:.4g} at step {int(steps[low]):,}"
        yield Finding("loss", "training", None, value, number=float(losses[-1]))


def _gradients(run: RunTables, row: _Row | None) -> Iterator[Finding]:
    """Yield the largest recorded gradient norm; if hooks recorded none, the largest norm of all gradients together."""
    if row is not None:
        here = functools.reduce(operator.and_, (ds.field(name) == row[name] for name in _IDENTITY[1:]))
        norms_here = [batch["l2"].to_numpy() for batch in _finite(run, ["l2"], here & ds.field("l2").is_valid())]
        value = f"{row['l2']:.4g}, median at this location {np.median(np.concatenate(norms_here)):.4g}"
        yield Finding("largest gradient norm", _where(row), row["step"], value, number=row["l2"])
        return
    training = (ds.field("phase") == "train") & ds.field("grad_norm").is_valid()
    steps, norms = _columns(run, "metrics", ["step", "grad_norm"], training)
    finite_norms = np.where(np.isfinite(norms), norms, -math.inf)
    if len(finite_norms) and finite_norms.max() > 0.0:
        at = int(finite_norms.argmax())
        value = f"{norms[at]:.4g}, median {np.median(norms[np.isfinite(norms)]):.4g}"
        yield Finding("largest gradient norm", "all parameters", int(steps[at]), value, number=float(norms[at]))


_FRACTIONS = {
    "dead_fraction": ("most dead units", "of its units are zero for a whole batch"),
    "zero_fraction": ("most zeros after a ReLU", "of its output is zero"),
    "saturated_fraction": ("most saturated", "of its output is saturated"),
}


def _fraction(largest: Mapping[str, _Row], name: str) -> Iterator[Finding]:
    """Yield the location with the largest fraction of its units or of its output."""
    if (row := largest.get(name)) is not None and row[name]:
        what, of_what = _FRACTIONS[name]
        yield Finding(what, _where(row), row["step"], f"{row[name]:.1%} {of_what}", number=row[name])


def _not_fired(run: RunTables) -> Iterator[Finding]:
    """Yield hooks that fired less often than expected, one finding per hook and reason."""
    columns = ["hook", "layer", "kind", "path", "expected", "fired", "cause"]
    rows = [row for batch in run.scan("coverage", columns) for row in batch.to_pylist()]
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if is_incomplete(row):
            groups.setdefault((row["hook"], row["kind"], row["cause"]), []).append(row)
    for (hook, kind, cause), group in groups.items():
        fired, expected = sum(row["fired"] for row in group), sum(row["expected"] for row in group)
        names = list(
            dict.fromkeys(location_name(row["layer"], row["path"], row["kind"]) for row in group)
        )  # all ranks have the same locations
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        where = f"{', '.join(names[:MAX_NAMES])}{more} ({hook}, {kind})"
        what = "fired less often than expected" if fired else "never fired"
        times = f"{fired:,} of {expected:,} times: " if expected else ""
        yield Finding(what, where, None, f"{times}{cause}", "warning", float(fired))


def _interventions(run: RunTables) -> Iterator[Finding]:
    """Yield how many elements each intervention changed."""
    effects = changed(run)
    specs = (hooks_of(run.info) or {}) if effects else {}
    for hook, effect in effects.items():
        locations = f"{effect.locations} location{'s' if effect.locations > 1 else ''}"
        norms = "" if effect.norms is None else ", mean norm {:.4g} -> {:.4g}".format(*effect.norms)
        few = 0 < effect.changed_fraction < FEW
        amount = f"{effect.changed:,} of {effect.elements:,}" if few else f"{effect.changed_fraction:.1%}"
        held = f", condition held in {effect.held:,}" if effect.conditional else ""
        where = f"{locations}, {effect.firings:,} firing{'s' if effect.firings > 1 else ''}{held} ({hook})"
        what = describe_action(specs[hook]) if hook in specs else "changed"
        yield Finding(what, where, None, f"{amount} changed{norms}", number=effect.changed_fraction)


def _where(row: _Row) -> str:
    phase = "" if row["phase"] == "train" else f", {row['phase']}"
    return f"{location_name(row['layer'], row['path'], row['kind'])} {row['role']} ({row['hook']}{phase})"


def _columns(run: RunTables, table: str, columns: list[str], condition: ds.Expression) -> list[np.ndarray[Any, Any]]:
    """Return numeric columns of a table as arrays, one per column."""
    batches = [batch.columns for batch in run.scan(table, columns, condition)]
    empty = np.empty(0)
    parts = zip(*batches, strict=True) if batches else [[] for _ in columns]
    return [np.concatenate([empty, *(array.to_numpy(zero_copy_only=False) for array in part)]) for part in parts]


def _finite(run: RunTables, columns: Iterable[str], condition: ds.Expression) -> Iterator[pa.RecordBatch]:
    """Yield columns of the finite statistics rows that fulfill a condition."""
    for batch in run.scan("stats", list(dict.fromkeys([*columns, *REQUIRED_COLUMNS])), condition):
        yield batch.filter(pa.array(~not_finite_in(batch)))


def _largest(run: RunTables) -> dict[str, _Row]:
    """Return the first finite statistics row with the largest value of each statistic, by its name."""
    best: dict[str, _Row] = {}
    columns = ("l2", "dead_fraction", "zero_fraction", "saturated_fraction")
    output = (ds.field("kind") == "forward") & (ds.field("role") == "output")
    kinds = [kind.name for kind in KINDS.values() if kind.gradient and kind.family != "optimizer"]
    gradient = ds.field("kind").isin(kinds) | (ds.field("role") == "param_grad")
    for batch in _finite(run, [*_IDENTITY, "module_type", *columns], gradient | output):
        is_output = pc.and_(pc.equal(batch["kind"], "forward"), pc.equal(batch["role"], "output"))
        of_relu = pc.and_(is_output, pc.is_in(batch["module_type"].cast(pa.string()), pa.array(_RECTIFIERS)))
        for name, selected in zip(columns, (pc.invert(is_output), is_output, of_relu, is_output), strict=True):
            values = np.where(selected, batch[name].to_numpy(zero_copy_only=False), math.nan)
            if not np.isnan(values).all():
                at = int(np.nanargmax(values))
                if name not in best or values[at] > best[name][name]:
                    (best[name],) = batch.slice(at, 1).to_pylist()
    return best
