"""The most important observations about a run, for the end of a run, the report and notebooks.

What is wrong comes from the rules of the run. The other observations have no thresholds.

Tables are read in batches and with the needed columns only, so that tables may be larger than memory.
"""

from __future__ import annotations

import functools
import math
import operator
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import fields
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset as ds

from ..config.hook_specs import describe_action
from ..config.parse import parse_rules
from ..config.rules import default_rules
from ..rules.rule_set import RuleEvent
from ..rules.step_rows import location_label, location_name
from ..tables.kinds import KINDS
from ..tables.reasons import is_incomplete
from ..tables.schemas import TABLES
from .config_comparison import hooks_of, rules_of
from .diagnosis import SEVERITIES, TRAINING, Finding, findings_of
from .finite import REQUIRED_COLUMNS, not_finite_in
from .frames import plain_labels
from .rule_events import rule_events
from .run_tables import RunTables

FEW = 0.0005  # fraction of elements below which the count is shown instead of the fraction
MAX_NAMES = 4

_IDENTITY = ["step", "hook", "layer", "kind", "role", "path", "phase"]
_Row = dict[str, Any]

RULE_EVENT_COLUMNS = [field.name for field in fields(RuleEvent)]


def findings(run: RunTables, *, evaluates: bool = True) -> list[Finding]:
    """Return the findings of one run in any state: those of rules grouped by cause, then the others, the most severe ones first.

    `evaluates`: whether the default rules read the rows of a run without rules, which takes minutes for millions of rows.
    """
    run.check_single()
    has_rules = "rules" in (run.info.get("config") or {})
    rules = rules_of(run.info) if has_rules else default_rules()
    evaluates &= not has_rules
    events = rule_events(run, parse_rules(rules)) if evaluates else recorded_events(run, rules)
    judged = findings_of(events, rules, run.info, layers_of(run))
    others = [*_loss(run), *_gradients(run), *not_trained(run), *not_fired(run), *_interventions(run)]
    return judged + sorted(others, key=lambda finding: SEVERITIES.index(finding.severity))


def layers_of(run: RunTables) -> list[str]:
    """Return the names of the modules in the order of the table `layers`."""
    return [name for batch in run.scan("layers", ["layer"]) for name in batch["layer"].to_pylist()]


def recorded_events(run: RunTables, names: Collection[str]) -> list[RuleEvent]:
    """Return the events that rules wrote during the run, in order."""
    fired = ds.field("rule").isin(pa.array([*names], pa.string())) & ds.field("value").is_valid()
    return [RuleEvent(**row) for batch in run.scan("events", RULE_EVENT_COLUMNS, fired) for row in batch.to_pylist()]


def _loss(run: RunTables) -> Iterator[Finding]:
    rows = run.read("metrics", ["step", "loss"], (ds.field("phase") == "train") & ds.field("loss").is_valid())
    steps, losses = rows["step"], rows["loss"].to_numpy()
    if not len(losses):
        return
    finite = np.flatnonzero(np.isfinite(losses))
    if len(finite):
        low, high = (int(finite[at]) for at in (losses[finite].argmin(), losses[finite].argmax()))
        value = f"{losses[0]:.4g} -> {losses[-1]:.4g}, lowest {losses[low]:.4g} at step {int(steps[low]):,}"
        if high:
            value += f", highest {losses[high]:.4g} at step {int(steps[high]):,}"
        yield Finding("loss", "training", None, value, number=float(losses[-1]))


def _gradients(run: RunTables) -> Iterator[Finding]:
    """Yield the largest norm of all gradients together, and that of a single tensor that hooks recorded."""
    rows = run.read("metrics", ["step", "grad_norm"], (ds.field("phase") == "train") & ds.field("grad_norm").is_valid())
    steps, norms = rows["step"], rows["grad_norm"].to_numpy()
    finite_norms = np.where(np.isfinite(norms), norms, -math.inf)
    if len(finite_norms) and finite_norms.max() > 0.0:
        at = int(finite_norms.argmax())
        value = f"{norms[at]:.4g}, median {np.median(norms[np.isfinite(norms)]):.4g}"
        yield Finding("largest gradient norm", "all parameters", int(steps[at]), value, number=float(norms[at]))
    row: _Row | None = None
    kinds = [kind.name for kind in KINDS.values() if kind.gradient and kind.family != "optimizer"]
    gradient = ds.field("kind").isin(kinds) | (ds.field("role") == "param_grad")
    for batch in _finite(run, [*_IDENTITY, "l2"], gradient & ds.field("l2").is_valid()):
        norms = batch["l2"].to_numpy()
        if len(norms) and (row is None or norms.max() > row["l2"]):
            (row,) = batch.slice(int(norms.argmax()), 1).to_pylist()
    if row is not None:
        here = functools.reduce(operator.and_, (ds.field(name) == row[name] for name in _IDENTITY[1:]))
        norms_here = [batch["l2"].to_numpy() for batch in _finite(run, ["l2"], here & ds.field("l2").is_valid())]
        value = f"{row['l2']:.4g}, median at this location {np.median(np.concatenate(norms_here)):.4g}"
        name = location_name(row["layer"], row["path"], row["kind"])
        where = location_label(name, row["role"], row["hook"], row["phase"])
        tensor = {name: row[name] for name in ("layer", "hook", "role")}
        yield Finding("largest gradient norm", where, row["step"], value, number=row["l2"], **tensor)


def not_trained(run: RunTables) -> Iterator[Finding]:
    """Yield what the optimizer does not hold, the model or a new module, unless another event says that it has changed.

    The optimizer of a resumed run is created after the model, so it holds the modules that were new before.
    """
    columns, of_optimizer = (
        ["step", "layer", "message", "severity", "rule"],
        ds.field("rule").isin(["optimizer", "resumed"]),
    )
    rows = [row for batch in run.scan("events", columns, of_optimizer) for row in batch.to_pylist()]
    resumed = max((row["step"] for row in rows if row["rule"] == "resumed"), default=0)
    rows = [row for row in rows if row["rule"] == "optimizer" and (not row["layer"] or row["step"] >= resumed)]
    changed = {row["layer"] for row in rows if row["severity"] == "info"}
    unheld = (tuple(row.values())[:3] for row in rows if row["severity"] == "warning" and row["layer"] not in changed)
    for step, layer, message in dict.fromkeys(unheld):  # all ranks write it
        yield Finding("not trained", layer or TRAINING, step, message, "warning", layer=layer)


def not_fired(run: RunTables) -> Iterator[Finding]:
    """Yield the hooks that fired less often than expected."""
    columns = ["hook", "layer", "kind", "path", "expected", "fired", "cause"]
    rows = [row for batch in run.scan("coverage", columns) for row in batch.to_pylist()]
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in rows:
        if is_incomplete(row):
            groups.setdefault((row["hook"], row["kind"], row["cause"]), []).append(row)
    for (hook, kind, cause), group in groups.items():
        fired, expected = sum(row["fired"] for row in group), sum(row["expected"] for row in group)
        # All ranks have the same locations.
        names = list(dict.fromkeys(location_name(row["layer"], row["path"], row["kind"]) for row in group))
        more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
        where = f"{', '.join(names[:MAX_NAMES])}{more} ({hook}, {kind})"
        what = "fired less often than expected" if fired else "never fired"
        times = f"{fired:,} of {expected:,} times: " if expected else ""
        layers = {row["layer"] for row in group}
        layer = layers.pop() if len(layers) == 1 else None
        yield Finding(what, where, None, f"{times}{cause}", "warning", float(fired), layer=layer, hook=hook)


def _interventions(run: RunTables) -> Iterator[Finding]:
    """Yield the effect of each intervention, in the order in which they first fired. Norms are means of firings with both."""
    location = ["hook", "layer", "path"]
    parts = []
    for batch in run.scan("effects", [*location, "numel", "changed", "norm_before", "norm_after", "held"]):
        rows = plain_labels(pa.Table.from_batches([batch])).to_pandas()
        normed = rows["norm_before"].notna() & rows["norm_after"].notna()
        numbers = {
            "firings": 1,
            "held": rows["held"].eq(True),
            "conditional": rows["held"].notna(),
            "elements": rows["numel"],
            "changed": rows["changed"],
            "before": rows["norm_before"].where(normed),
            "after": rows["norm_after"].where(normed),
            "normed": normed,
        }
        parts.append(rows[location].assign(**numbers).groupby(location, sort=False).sum())
    if not parts:
        return
    sums = pd.concat(parts).groupby(location, sort=False).sum().assign(locations=1)
    totals = sums.groupby("hook", sort=False).sum().astype({"elements": int, "changed": int})
    specs = hooks_of(run.info) or {}
    for hook, effect in totals.to_dict("index").items():
        locations = f"{effect['locations']} location{'s' if effect['locations'] > 1 else ''}"
        norms = (effect[name] / max(1, effect["normed"]) for name in ("before", "after"))
        norm_text = ", mean norm {:.4g} -> {:.4g}".format(*norms) if effect["normed"] else ""
        fraction = effect["changed"] / max(1, effect["elements"])
        amount = f"{effect['changed']:,} of {effect['elements']:,}" if 0 < fraction < FEW else f"{fraction:.1%}"
        held = f", condition held in {effect['held']:,}" if effect["conditional"] else ""
        where = f"{locations}, {effect['firings']:,} firing{'s' if effect['firings'] > 1 else ''}{held} ({hook})"
        what = describe_action(specs[hook]) if hook in specs else "changed"
        yield Finding(what, where, None, f"{amount} changed{norm_text}", number=fraction, hook=str(hook))


def _finite(run: RunTables, columns: Iterable[str], condition: ds.Expression) -> Iterator[pa.RecordBatch]:
    for batch in run.scan("stats", list(dict.fromkeys([*columns, *REQUIRED_COLUMNS])), condition):
        yield batch.filter(pa.array(~not_finite_in(batch)))


def recorded(run: RunTables) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """Return the numbers of firings, of rows (of statistics and further tables) and of tensors, by record hook."""
    firings: Counter[str] = Counter()
    for batch in run.scan("coverage", ["hook", "fired"]):
        for row in batch.to_pylist():
            firings[row["hook"]] += row["fired"]
    of_rows = sum((_count(run, name) for name, table in TABLES.items() if table.fields), _count(run, "stats"))
    return firings, of_rows, _count(run, "tensors")


def _count(run: RunTables, table: str) -> Counter[str]:
    counts: Counter[str] = Counter()
    for batch in run.scan(table, ["hook"]):
        for cell in batch["hook"].cast(pa.string()).value_counts().to_pylist():
            counts[cell["values"]] += cell["counts"]
    return counts
