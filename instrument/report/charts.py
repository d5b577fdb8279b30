"""Data of the charts of one run, from its history: all of it, or what changed since a version; and the evidence of a finding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from html import escape
from typing import Any

import numpy as np

from ..analysis.config_comparison import hooks_of, rules_of
from ..analysis.diagnosis import Finding
from ..analysis.overview import WIDE
from ..analysis.plot_data import RecordedSeries, rank_in
from ..analysis.run_history import RunHistory
from ..analysis.step_history import DISTRIBUTION_COLUMNS, LocationDistributions, StepHistory
from ..config.hook_specs import describe_action
from ..formatting import format_number
from ..rules.step_rows import location_label

DIGITS = 6
WIDTH, HEIGHT, MARGIN = 320, 72, 14  # pixels of the evidence


def rounded(values: Any) -> Any:
    """Round a number, an array or nested lists to six digits; non-finite numbers become None."""
    if isinstance(values, np.ndarray):
        values = values.tolist()
    if isinstance(values, list | tuple):
        return [rounded(value) for value in values]
    if values is None or isinstance(values, str | bool | int):
        return values
    return float(f"{values:.{DIGITS}g}") if math.isfinite(values) else None


def charts(history: RunHistory) -> dict[str, Any]:
    """Return the data of all charts. Each part has groups of steps, and by statistic one row for each location."""
    settings = {name: describe_action(spec) for name, spec in (hooks_of(history.info) or {}).items()}
    changes = changed_charts(history)
    parts = {
        "series": [_labels(history, series, each) for series, each in history.series.items()],
        "effects": [
            {**_labels(history, series, each), "settings": settings.get(series.hook, "")}
            for series, each in history.effects.items()
        ],
        "distributions": [{**_about(series), "location": at} for series, at in history.distributions.locations],
    }
    for key, labels in parts.items():
        changes[key] = [{**label, **one} for label, one in zip(labels, changes[key], strict=True)]
    return {"version": history.version, **changes, **lanes(history)}


def changed_charts(history: RunHistory, since: int = -1) -> dict[str, Any]:
    """Return the groups of steps that changed after a version, in the order of the parts of `charts`."""
    return {
        "series": [_columns(each, since, _rows(history, each)) for each in history.series.values()],
        "effects": [_columns(each, since, _rows(history, each)) for each in history.effects.values()],
        "distributions": [_distributions(location, since) for location in history.distributions.locations.values()],
        "metrics": metric_curves(history, since),
    }


def metric_curves(history: RunHistory, since: int = -1) -> dict[str, Any]:
    """Return the metrics of each phase over steps; a group of steps has the mean of its finite values.

    `bad` has, for each metric, steps at which the metric was recorded but is not finite.
    """
    curves = {phase: {**_columns(each, since, [0]), "bad": {}} for phase, each in history.metrics.items()}
    for (phase, name), steps in history.not_finite.items():
        curves[phase]["bad"][name] = steps
    return curves


def lanes(history: RunHistory) -> dict[str, Any]:
    """Return the steps of interventions, and warnings, errors and firings of rules that belong to a step."""
    acted = []
    for hook, each in history.acted.items():
        first, last = each.steps(each.groups())
        gaps = np.flatnonzero(first[1:] > last[:-1] + 1)  # adjacent groups are one range
        ranges = np.stack([first[[0, *(gaps + 1)]], last[[*gaps, -1]]], axis=1)
        acted.append({"hook": hook, "steps": ranges.tolist(), "count": len(history.acted_steps[hook])})
    rules = rules_of(history.info)
    alerts = [
        {
            **{key: event[key] for key in ("step", "rule", "message", "severity")},
            "lane": "rules" if event["rule"] in rules else "alerts",
        }
        for event in history.events
        if event["step"] is not None and (event["severity"] in ("warning", "error") or event["value"] is not None)
    ]
    return {"acted": acted, "alerts": alerts}


def _about(series: RecordedSeries) -> dict[str, Any]:
    properties = {"gradient": series.is_gradient, "parameters": series.is_of_parameters}
    return {"label": series.label, **asdict(series), **properties}


def _labels(history: RunHistory, series: RecordedSeries, each: StepHistory) -> dict[str, Any]:
    return {
        **_about(series),
        "locations": [each.locations[row] for row in _rows(history, each)],
        "usual": series.shown_first(each.statistics),
        "types": {name: history.places[name][1] for name in each.locations},
    }


def _rows(history: RunHistory, each: StepHistory) -> list[int]:
    rank = rank_in(history.order)
    layers = [history.places[name][0] for name in each.locations]
    return sorted(range(len(layers)), key=lambda row: rank(layers[row]))


def _columns(history: StepHistory, since: int, rows: Sequence[int]) -> dict[str, Any]:
    groups = history.groups(since)
    first, last = history.steps(groups)
    return {
        "groups": (first // history.width).tolist(),
        "first": first.tolist(),
        "last": last.tolist(),
        "several": history.has_several,
        "statistics": {name: rounded(history.values(name, groups)[rows]) for name in history.statistics},
    }


def _distributions(location: LocationDistributions, since: int) -> dict[str, Any]:
    changed = {key: (step, row) for key, (step, version, row) in sorted(location.rows.items()) if version > since}
    steps = [step for step, _ in changed.values()]
    return {
        "groups": list(changed),
        "first": steps,
        "last": steps,
        "of": location.step_count,
        "several": location.has_several,
        "statistics": {name: [rounded([row[name] for _, row in changed.values()])] for name in DISTRIBUTION_COLUMNS},
    }


def evidence(history: RunHistory, finding: Finding) -> str:
    """Return an SVG picture; an empty string if fewer than two steps have a value.

    Missing values, such as those of a tensor that is not finite, are gaps.
    """
    curve = curve_of(history, finding)
    if curve is None or finding.step is None:
        return ""
    steps, values = curve
    known = np.isfinite(values)
    if known.sum() < 2:
        return ""
    shown = np.append(values[known], [] if finding.threshold is None else finding.threshold)
    is_log = shown.min() > 0 and shown.max() / shown.min() > WIDE
    heights = np.log(np.where(values > 0, values, np.nan)) if is_log else values
    low, high = (np.log(shown.min()), np.log(shown.max())) if is_log else (shown.min(), shown.max())
    first, last = int(steps[0]), max(int(steps[-1]), finding.step)

    def x(step: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * (step - first) / max(1, last - first)

    def y(height: float) -> float:
        return HEIGHT / 2 if high == low else HEIGHT - MARGIN - (HEIGHT - 2 * MARGIN) * (height - low) / (high - low)

    parts = [f'<line class="step" x1="{x(finding.step):.1f}" x2="{x(finding.step):.1f}" y1="2" y2="{HEIGHT - 2}"/>']
    bound = ""
    if finding.threshold is not None:
        level = y(np.log(finding.threshold) if is_log else finding.threshold)
        parts.append(f'<line class="bound" x1="{MARGIN}" x2="{WIDTH - MARGIN}" y1="{level:.1f}" y2="{level:.1f}"/>')
        bound = f"; dashed: threshold {format_number(finding.threshold)}"
    for piece in np.split(np.arange(len(steps)), np.flatnonzero(~known)):
        inside = piece[known[piece]]
        points = " ".join(f"{x(steps[at]):.1f},{y(heights[at]):.1f}" for at in inside)
        parts.append(f'<polyline points="{points}"/>' if len(inside) > 1 else "")
        if len(inside) == 1:
            parts.append(f'<circle cx="{x(steps[inside[0]]):.1f}" cy="{y(heights[inside[0]]):.1f}" r="2"/>')
    numbers = [format_number(float(bound_)) for bound_ in (values[known].min(), values[known].max())]
    scale = ", logarithmic" if is_log else ""
    text = f"{finding.statistic}{scale}, {numbers[0]} to {numbers[1]}, steps {first:,} to {last:,}; marked: step {finding.step:,}{bound}"
    return (
        f'<figure class="evidence"><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(text)}">{"".join(parts)}</svg>'
        f"<figcaption>{escape(text)}</figcaption></figure>"
    )


def curve_of(history: RunHistory, finding: Finding) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the first step of each group, int64 [groups], and the values, float64 [groups]; None if they were not recorded."""
    metrics = history.metrics.get("train")
    if metrics is not None and finding.statistic in metrics.statistics:
        return _values_at(metrics, finding.statistic, 0)
    for series, each in history.series.items():
        for row, location in enumerate(each.locations if finding.statistic in each.statistics else ()):
            if location_label(location, series.role, series.hook, series.phase) == finding.where:
                return _values_at(each, finding.statistic, row)
    return None


def _values_at(history: StepHistory, statistic: str, row: int) -> tuple[np.ndarray, np.ndarray]:
    groups = history.groups()
    return history.steps(groups)[0], history.values(statistic, groups)[row]
