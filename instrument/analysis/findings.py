"""The most important observations about a run, for the end of a run, the report and notebooks.

Tables are read in batches and with the needed columns only, so that tables may be larger than memory.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds

from ..capture.tables import is_incomplete
from ..errors import ConfigError, InstrumentError
from ..spec.description import describe_action
from ..spec.kinds import KINDS
from ..spec.parse import parse_hooks
from ..spec.statistics import USUAL_UPDATE_RATIOS
from .finite import REQUIRED_COLUMNS, not_finite_in
from .plot_data import location_name
from .run_tables import RunTables
from .summary import changed

Severity = Literal["info", "warning", "error"]

MANY_DEAD = 0.4  # "as much as 40%": CS231n, https://cs231n.github.io/neural-networks-1/#actfun
MANY_SATURATED = 0.5
FEW = 0.0005  # fraction of elements below which the count is shown instead of the fraction
MOST_NAMES = 4

_IDENTITY = ["step", "hook", "layer", "kind", "role", "path", "phase"]
_GRADIENTS = [kind.name for kind in KINDS.values() if kind.gradient and kind.family != "optimizer"]
_RECTIFIERS = ["ReLU", "ReLU6", "Threshold"]  # zeros in their output are inactive units


@dataclass(frozen=True)
class Finding:
    """One observation about a run.

    Attributes:
        what: A short description.
        where: The layer, parameter or hook.
        when: The step; None if the observation is about the run as a whole.
        value: The value as text.
        severity: `info`, `warning`, or `error` if the training is unusable.
        number: The value as a number, if it is numeric.
    """

    what: str
    where: str
    when: int | None
    value: str
    severity: Severity = "info"
    number: float | None = None


def findings(run: RunTables) -> list[Finding]:
    """Return the findings of one run in any state, the most severe ones first.

    Raises:
        InstrumentError: `run` contains several runs.
    """
    if len(run.folders) > 1:
        raise InstrumentError(f"findings require a single run, but {run.path} contains {len(run.folders)} runs")
    sources: Sequence[Callable[[RunTables], Iterator[Finding]]] = (
        *(_not_finite, _loss, _gradients, _dead, _saturated),
        *(_updates, _not_fired, _interventions),
    )
    all_findings = [finding for source in sources for finding in source(run)]
    return sorted(all_findings, key=lambda finding: ("error", "warning", "info").index(finding.severity))


def _not_finite(run: RunTables) -> Iterator[Finding]:
    """Yield the first non-finite values; gradients of steps that a gradient scaler skipped are ignored."""
    skipped = [
        step for batch in run.scan("metrics", ["step"], ds.field("skipped")) for step in batch["step"].to_pylist()
    ]
    handled = ds.field("kind").isin(_GRADIENTS) & ds.field("step").isin(pa.array(skipped, pa.int64()))
    bad = ((ds.field("nan_count") > 0) | (ds.field("inf_count") > 0)) & ~handled
    row = _first(run, ["numel", "nan_count", "inf_count"], bad)
    if row is not None:
        of = "" if row["numel"] is None else f" of {row['numel']:,}"
        value = f"{row['nan_count'] or 0:,} NaN, {row['inf_count'] or 0:,} infinite{of}"
        yield Finding("first recorded non-finite value", _where(row), row["step"], value, "warning")


def _loss(run: RunTables) -> Iterator[Finding]:
    """Yield the first, last and lowest training loss, and the first step at which the loss was not finite."""
    training = ds.field("phase") == "train"
    steps, losses = _columns(run, "metrics", ["step", "loss"], training & ds.field("loss").is_valid())
    if not len(losses):
        return
    finite = np.isfinite(losses)
    if not finite.all():
        at = int(finite.argmin())
        before = f", {losses[at - 1]:.4g} before" if at else ""
        yield Finding("loss not finite", "training", int(steps[at]), f"{losses[at]}{before}", "error")
    if finite.any():
        finite_losses = np.where(finite, losses, math.inf)
        low = int(finite_losses.argmin())
        value = f"{losses[0]:.4g} -> {losses[-1]:.4g}, lowest {losses[low]:.4g} at step {int(steps[low]):,}"
        yield Finding("loss", "training", None, value, number=float(losses[-1]))


def _gradients(run: RunTables) -> Iterator[Finding]:
    """Yield the largest recorded gradient norm; if hooks recorded none, the largest norm of all gradients together."""
    gradient = ds.field("kind").isin(_GRADIENTS) | (ds.field("role") == "param_grad")
    row = _largest(run, "l2", gradient)
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


_OUTPUT = (ds.field("kind") == "forward") & (ds.field("role") == "output")


def _dead(run: RunTables) -> Iterator[Finding]:
    """Yield the layer with the most dead units; if these were not recorded, the ReLU output with the most zeros."""
    row = _largest(run, "dead_fraction", _OUTPUT)
    if row is not None:
        fraction = row["dead_fraction"]
        if fraction:
            severity: Severity = "warning" if fraction >= MANY_DEAD else "info"
            value = f"{fraction:.1%} of its units are zero for a whole batch"
            yield Finding("most dead units", _where(row), row["step"], value, severity, fraction)
        return
    row = _largest(run, "zero_fraction", _OUTPUT & ds.field("module_type").isin(_RECTIFIERS))
    if row is not None:
        fraction = row["zero_fraction"]
        yield Finding(
            "most zeros after a ReLU",
            _where(row),
            row["step"],
            f"{fraction:.1%} of its output is zero",
            number=fraction,
        )


def _saturated(run: RunTables) -> Iterator[Finding]:
    """Yield the activation with the most saturated outputs."""
    row = _largest(run, "saturated_fraction", _OUTPUT)
    if row is not None and row["saturated_fraction"]:
        fraction = row["saturated_fraction"]
        severity: Severity = "warning" if fraction >= MANY_SATURATED else "info"
        yield Finding(
            "most saturated", _where(row), row["step"], f"{fraction:.1%} of its output is saturated", severity, fraction
        )


def _updates(run: RunTables) -> Iterator[Finding]:
    """Yield parameters with a median update ratio outside the range that is usual for networks that learn well."""
    columns = ["layer", "path", "kind", "update_ratio"]
    batches = list(_finite(run, columns, ds.field("update_ratio").is_valid()))
    if not sum(batch.num_rows for batch in batches):
        return
    frame = pa.Table.from_batches(batches).unify_dictionaries().to_pandas()
    ratios = frame.groupby(["layer", "path", "kind"], observed=True)["update_ratio"].median()
    low, high = USUAL_UPDATE_RATIOS
    for what, out, extreme in (
        (f"updates above {high:g}", ratios[ratios > high], "idxmax"),
        (f"updates below {low:g}", ratios[ratios < low], "idxmin"),
    ):
        if len(out):
            worst = getattr(out, extreme)()
            value = f"{out[worst]:.2g} in the median; {len(out)} of {len(ratios)} parameters"
            yield Finding(what, location_name(*worst), None, value, number=float(out[worst]))


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
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        where = f"{', '.join(names[:MOST_NAMES])}{more} ({hook}, {kind})"
        what = "fired less often than expected" if fired else "never fired"
        times = f"{fired:,} of {expected:,} times: " if expected else ""
        yield Finding(what, where, None, f"{times}{cause}", "warning", float(fired))


def _interventions(run: RunTables) -> Iterator[Finding]:
    """Yield how many elements each intervention changed."""
    effects = changed(run)
    descriptions = _described(run) if effects else {}
    for hook, effect in effects.items():
        locations = f"{effect.location_count} location{'s' if effect.location_count > 1 else ''}"
        norms = "" if effect.norms is None else ", mean norm {:.4g} -> {:.4g}".format(*effect.norms)
        few = 0 < effect.changed_fraction < FEW
        amount = f"{effect.changed:,} of {effect.elements:,}" if few else f"{effect.changed_fraction:.1%}"
        where = f"{locations}, {effect.firings:,} firing{'s' if effect.firings > 1 else ''} ({hook})"
        yield Finding(
            descriptions.get(hook, "changed"), where, None, f"{amount} changed{norms}", number=effect.changed_fraction
        )


def _described(run: RunTables) -> dict[str, str]:
    """Return a short description of the action of each hook, if the configuration is readable."""
    try:
        specs = parse_hooks(run.info["config"]["hooks"])
    except (ConfigError, KeyError, TypeError):  # a hook was passed as an object, or run.json is damaged
        return {}
    return {name: describe_action(spec) for name, spec in specs.items()}


def _where(row: dict[str, Any]) -> str:
    phase = "" if row["phase"] == "train" else f", {row['phase']}"
    return f"{location_name(row['layer'], row['path'], row['kind'])} {row['role']} ({row['hook']}{phase})"


def _columns(run: RunTables, table: str, columns: list[str], condition: ds.Expression) -> list[np.ndarray[Any, Any]]:
    """Return numeric columns of a table as arrays, one per column."""
    batches = [batch.columns for batch in run.scan(table, columns, condition)]
    empty = np.empty(0)
    parts = zip(*batches, strict=True) if batches else [[] for _ in columns]
    return [np.concatenate([empty, *(array.to_numpy(zero_copy_only=False) for array in part)]) for part in parts]


def _finite(run: RunTables, columns: list[str], condition: ds.Expression) -> Iterator[pa.RecordBatch]:
    """Yield columns of the finite statistics rows that fulfill a condition."""
    for batch in run.scan("stats", list(dict.fromkeys([*columns, *REQUIRED_COLUMNS])), condition):
        yield batch.filter(pa.array(~not_finite_in(batch)))


def _largest(run: RunTables, column: str, condition: ds.Expression) -> dict[str, Any] | None:
    """Return the first finite statistics row with the largest value in a column; None if the column is empty."""
    best: dict[str, Any] | None = None
    for batch in _finite(run, [*_IDENTITY, column], condition & ~ds.field(column).is_null(nan_is_null=True)):
        if batch.num_rows:
            at = int(batch[column].to_numpy(zero_copy_only=False).argmax())
            if best is None or batch[column][at].as_py() > best[column]:
                (best,) = batch.slice(at, 1).to_pylist()
    return best


def _first(run: RunTables, columns: list[str], condition: ds.Expression) -> dict[str, Any] | None:
    """Return the statistics row with the lowest step that fulfills a condition; of several, the first one written."""
    first: dict[str, Any] | None = None
    for batch in run.scan("stats", [*_IDENTITY, *columns], condition):
        if batch.num_rows:
            at = int(batch["step"].to_numpy().argmin())
            if first is None or batch["step"][at].as_py() < first["step"]:
                (first,) = batch.slice(at, 1).to_pylist()
    return first
