"""Texts and tables of the page of one run; `instrument.report.charts` prepares the charts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import cycle
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

from ..analysis.config_comparison import rules_of
from ..analysis.diagnosis import Finding, diagnoses
from ..analysis.findings import findings
from ..analysis.load import Run
from ..analysis.overview import coverage_rows
from ..analysis.run_history import RunHistory, history_of
from ..config.description import describe_forward
from ..config.experiment import ForwardConfig
from ..formatting import format_number
from ..plot.look import CATEGORIES
from .charts import charts
from .evidence import evidence
from .panels import RUN_PANELS, Panel, panels
from .pictures import maps

MAX_EVENTS = 200
MAX_ALERTS = 8
OUTCOMES = {
    "killed": "The run was killed: its last steps may be missing, and it has no coverage table.",
    "running": "The run is in progress: this page shows the data recorded so far.",
    "interrupted": "The run was interrupted.",
    "deleted": "The folder of the run was deleted: this page shows the data that was read before.",
    "unknown": "run.json cannot be read: this page shows the tables only.",
}
PARTS = {
    "findings": "Findings",
    "training": "Training",
    "layers": "Layers",
    "flow": "Gradient flow",
    "units": "Units",
    "maps": "Maps",
    "interventions": "Interventions",
    "coverage": "Coverage",
    "events": "Events",
    "model": "Model",
}


def content(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the template, and the data of the charts."""
    history = history_of(run)
    shown = panels(run, RUN_PANELS)
    others = frozenset().union(*(panel.shown for panel in shown.values()))
    numbers = {**charts(history), "maps": maps(run, history.order, others)}
    return values(history, numbers, findings(run), run.problems, shown), numbers


def values(
    history: RunHistory,
    numbers: Mapping[str, Any],
    all_findings: Sequence[Finding],
    problems: Sequence[str],
    shown: Mapping[str, Panel] = MappingProxyType({}),
) -> dict[str, Any]:
    """Return the values of the template.

    Args:
        history: The history of the run.
        numbers: The data of the charts, of which `acted` and `alerts` are needed.
        all_findings: The findings.
        problems: Files that cannot be read.
        shown: The panels by name. Default: none.
    """
    info, layers = history.info, history.layers
    hooks = dict.fromkeys(hook for row in layers for hook in row["hooks"])
    return {
        "title": info.get("name") or history.folder.name,
        "status": info["status"],
        "facts": _facts(history),
        "diagnoses": [(each, evidence(history, each.lead)) for each in diagnoses(all_findings)],
        "findings": [finding for finding in all_findings if not finding.rule],
        "interventions": bool(numbers["acted"]),
        "has_alerts": bool(numbers["alerts"]),
        "coverage": coverage_rows(history.coverage),
        "events": history.events[:MAX_EVENTS],
        "more_events": max(0, history.event_counts.total() - MAX_EVENTS),
        "tree": _tree(layers),
        "colour_of": dict(zip(hooks, cycle(CATEGORIES), strict=False)),
        "command": _command(info.get("command") or []),
        "config": yaml.safe_dump(info.get("config"), sort_keys=False, allow_unicode=True),
        "sweep": None,
        "takes_changes": False,
        "parts": list(PARTS.items()),
        "panels": shown,
        "alerts": [*(_alert("files", problem) for problem in problems), *_alerts(history)],
    }


def _command(arguments: list[str]) -> str:
    """Return the command line that started the run, as far as `sys.argv` shows it."""
    modules = {"__main__.py": "instrument", "instrument": "instrument", "replay.py": "instrument.replay"}
    module = modules.get(Path(arguments[0]).name) if arguments else None
    return shlex.join(arguments if module is None else ["python", "-m", module, *arguments[1:]])


def _facts(history: RunHistory) -> list[tuple[str, str]]:
    info = history.info
    data = info.get("data") or {}
    config, replay, forward = info.get("config") or {}, info.get("replay"), None
    if config.get("mode") == "forward":
        passes = ForwardConfig.model_validate(config.get("forward") or {})
        forward = f"forward, no training: {describe_forward(passes)}"
    samples = f"{data['train_samples']:,}" if data.get("train_samples") else None
    if samples and forward is None:
        samples += f" for training, {data['eval_samples']:,} for evaluation"
    origin, first = None, 0
    if replay:
        first, stop = replay["steps"]
        what = "counterfactual" if replay["counterfactual"] else "replay"
        origin = f"{what} of {replay['source']}, steps {first} to {stop - 1}"
    means = info.get("metrics") or {}
    steps = history.step - first
    total = history.steps if info["status"] == "running" and forward is None and not replay else None
    of_forward = {} if forward is None else {f"mean {name}": means.get(name) for name in ("loss", "accuracy")}
    started, ended = (datetime.fromisoformat(info[key]) if info.get(key) else None for key in ("started", "ended"))
    facts = {
        "origin": origin,
        "model": (config.get("model") or {}).get("_target_"),
        "data": data.get("dataset"),
        "mode": forward,
        "samples": samples,
        "device": info.get("device"),
        "steps" if forward is None else "batches": f"{steps:,}" + (f" of {total:,}" if total else ""),
        **{name: format_number(mean) or None for name, mean in of_forward.items()},
        "weights": (info.get("init_from") or {}).get("path"),
        "seed": info.get("seed"),
        "started": None if started is None else started.strftime("%Y-%m-%d %H:%M:%S %Z"),
        "duration": None if started is None or ended is None else ended - started,
        "overhead": None if info.get("overhead") is None else f"{info['overhead']:+.1%} per step",
        "parameters": f"{sum(row['parameters'] for row in history.layers):,}" if history.layers else None,
        "torch": (info.get("versions") or {}).get("torch"),
        "revision": (info.get("git_revision") or "")[:12] or None,
    }
    return [(name, str(value)) for name, value in facts.items() if value is not None]


def _alerts(history: RunHistory) -> list[dict[str, Any]]:
    """Return the problems shown at the top of the page, the most severe ones first. Firings of rules are findings."""
    info = history.info
    alerts: list[dict[str, Any]] = []
    if info["status"] == "stopped":
        alerts.append(_alert("stopped", f"The run was stopped before its last step: {info.get('error')}", "warning"))
    elif info.get("error") and info["status"] != "interrupted":
        alerts.append(_alert(info["status"], info["error"]))
    elif info["status"] in OUTCOMES:
        alerts.append(_alert(info["status"], OUTCOMES[info["status"]], "warning"))
    if info.get("recording_stopped"):
        alerts.append(_alert("recording", info["recording_stopped"]))
    rules, known = rules_of(info), {alert["message"] for alert in alerts}
    more = [event for event in history.events if event["rule"] not in rules and event["message"] not in known]
    for severity in ("error", "warning"):
        alerts += [event for event in more if event["severity"] == severity]
    if len(alerts) > MAX_ALERTS:
        rest = f"{len(alerts) - MAX_ALERTS} more warnings are listed under Events"
        alerts = [*alerts[:MAX_ALERTS], _alert("events", rest, "warning")]
    return alerts


def _alert(rule: str, message: str, severity: str = "error") -> dict[str, Any]:
    return {"severity": severity, "rule": rule, "message": message, "step": None}


def _tree(layers: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    nodes: dict[str, dict[str, Any]] = {}
    for row in layers:
        above, _, name = row["layer"].rpartition(".")
        nodes[row["layer"]] = {**row, "name": name or ".", "type": row["module_type"], "children": []}
        if row["layer"]:
            nodes[above if above in nodes else ""]["children"].append(nodes[row["layer"]])
    return nodes.get("")
