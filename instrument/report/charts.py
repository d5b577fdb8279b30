"""Data of the charts of one run, from its history: all of it, or what changed since a version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from ..analysis.config_comparison import hooks_of, rules_of
from ..analysis.plot_data import RecordedSeries, rank_in
from ..analysis.run_history import RunHistory
from ..analysis.step_history import DISTRIBUTION_COLUMNS, LocationDistributions, StepHistory
from ..config.description import describe_action
from .numbers import rounded


def charts(history: RunHistory) -> dict[str, Any]:
    """Return the data of all charts. Each part has groups of steps, and by statistic one row for each location."""
    specs = hooks_of(history.info) or {}
    settings = {name: describe_action(spec) for name, spec in specs.items()}
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
    bad: dict[str, dict[str, list[int]]] = {phase: {} for phase in history.metrics}
    for (phase, name), steps in history.not_finite.items():
        bad[phase][name] = steps
    return {phase: {**_columns(each, since, [0]), "bad": bad[phase]} for phase, each in history.metrics.items()}


def lanes(history: RunHistory) -> dict[str, Any]:
    """Return the steps of interventions, and warnings, errors and firings of rules that belong to a step."""
    acted = []
    for hook, each in history.acted.items():
        first, last, steps = each.steps(each.groups())
        gaps = np.flatnonzero(first[1:] > last[:-1] + 1)  # adjacent groups are one range
        ranges = np.stack([first[[0, *(gaps + 1)]], last[[*gaps, -1]]], axis=1)
        acted.append({"hook": hook, "steps": ranges.tolist(), "count": int(steps.sum())})
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
        "types": {name: history.places[name][1] for name in each.locations},
    }


def _rows(history: RunHistory, each: StepHistory) -> list[int]:
    rank = rank_in(history.order)
    layers = [history.places[name][0] for name in each.locations]
    return sorted(range(len(layers)), key=lambda row: rank(layers[row]))


def _columns(history: StepHistory, since: int, rows: Sequence[int]) -> dict[str, Any]:
    groups = history.groups(since)
    first, last, _ = history.steps(groups)
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
