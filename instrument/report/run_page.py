"""Texts and tables of the page of one run; `instrument.report.charts` prepares the charts."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from ..analysis.findings import Finding, findings
from ..analysis.load import Run
from ..plot.style import CATEGORIES
from ..rules.step_rows import location_name
from ..spec.config import ForwardConfig
from ..spec.description import describe_forward
from ..spec.schedule import STEP_PHASES
from .charts import charts, rule_names
from .panels import panels

MOST_EVENTS = 200
MOST_PLACES = 6  # maximum number of locations listed for a hook that did not fire
MOST_ALERTS = 8
OUTCOMES = {
    "killed": "The run was killed: its last steps may be missing, and it has no coverage table.",
    "running": "The run is in progress: this page shows the data recorded so far.",
    "interrupted": "The run was interrupted.",
    "deleted": "The folder of the run was deleted: this page shows the data that was read before.",
    "unknown": "run.json cannot be read: this page shows the tables only.",
}
# Fields of an intervention that are not among its settings on the page: where and when it acts.
NOT_SETTINGS = (
    *("layers", "kind", "role", "name", "types", "params", "exclude"),
    *("every", "start", "stop", "steps", "phase"),
)
PARTS = {
    "findings": "Findings",
    "training": "Training",
    "layers": "Layers",
    "flow": "Gradient flow",
    "units": "Units",
    "attention": "Attention",
    "maps": "Maps",
    "interventions": "Interventions",
    "coverage": "Coverage",
    "events": "Events",
    "model": "Model",
}


@dataclass(frozen=True)
class PageTables:
    """The tables that the page shows as text.

    Attributes:
        path: The folder of the run.
        info: The content of run.json.
        steps: The number of steps.
        layers: The table `layers`.
        events: The first events.
        event_count: The number of all events.
        coverage: The table `coverage`.
        findings: The findings.
        problems: Files that cannot be read.
    """

    path: Path
    info: Mapping[str, Any]
    steps: int
    layers: pd.DataFrame
    events: pd.DataFrame
    event_count: int
    coverage: pd.DataFrame
    findings: Sequence[Finding]
    problems: Sequence[str]


def content(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the template, and the data of the charts."""
    numbers = charts(run)
    add_settings(numbers, run.info)
    steps = run.metrics[run.metrics["phase"].isin(STEP_PHASES)]["step"].nunique()
    observed = findings(run)
    tables = PageTables(
        *(run.path, run.info, steps, run.layers, run.events, len(run.events)),
        *(run.coverage, observed, run.problems),
    )
    return {**values(tables, numbers), "panels": [*panels(run)]}, numbers


def add_settings(numbers: Mapping[str, Any], info: Mapping[str, Any]) -> None:
    """Add the settings of each intervention to the data of its chart."""
    settings = _intervention_settings(info)
    for effect in numbers["effects"]:
        effect["settings"] = settings.get(effect["hook"], "")


def values(tables: PageTables, numbers: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the template.

    Args:
        tables: The tables.
        numbers: The data of the charts.
    """
    info = tables.info
    return {
        "title": info.get("name") or tables.path.name,
        "status": info["status"],
        "facts": _facts(tables),
        "findings": tables.findings,
        "interventions": bool(numbers["acted"]),
        "has_alerts": bool(numbers["alerts"]),
        "coverage": _coverage(tables.coverage),
        "events": _events(tables.events),
        "more_events": max(0, tables.event_count - MOST_EVENTS),
        "tree": _tree(tables.layers),
        "colour_of": _colours(tables.layers),
        "command": _command(info.get("command") or []),
        "config": yaml.safe_dump(info.get("config"), sort_keys=False, allow_unicode=True),
        "parts": list(PARTS.items()),
        "panels": [],
        "alerts": _alerts(tables),
    }


def _command(arguments: list[str]) -> str:
    """Return the command line that started the run, as far as `sys.argv` shows it."""
    modules = {"__main__.py": "instrument", "replay.py": "instrument.replay"}
    module = modules.get(Path(arguments[0]).name) if arguments else None
    return shlex.join(arguments if module is None else ["python", "-m", module, *arguments[1:]])


def _replay_text(info: Mapping[str, Any]) -> str | None:
    """Return which run and steps a replay repeats; None for other runs."""
    if not (replay := info.get("replay")):
        return None
    start, stop = replay["steps"]
    what = "counterfactual" if replay["counterfactual"] else "replay"
    return f"{what} of {replay['source']}, steps {start} to {stop - 1}"


def _facts(tables: PageTables) -> list[tuple[str, str]]:
    """Return the facts of the header: model, data, device, duration and versions."""
    info = tables.info
    data = info.get("data") or {}
    model = ((info.get("config") or {}).get("model") or {}).get("_target_")
    forward = _forward_text(info)
    means = info.get("metrics") or {}
    facts = {
        "origin": _replay_text(info),
        "model": model,
        "data": data.get("dataset"),
        "mode": forward,
        "samples": _samples_text(data, trains=forward is None),
        "device": info.get("device"),
        "steps" if forward is None else "batches": f"{tables.steps:,}",
        **({} if forward is None else {f"mean {name}": _four_digits(means.get(name)) for name in ("loss", "accuracy")}),
        "weights": (info.get("init_from") or {}).get("path"),
        "seed": info.get("seed"),
        "started": _moment(info.get("started")),
        "duration": _duration(info),
        "overhead": None if info.get("overhead") is None else f"{info['overhead']:+.1%} per step",
        "parameters": f"{int(tables.layers['parameters'].sum()):,}" if len(tables.layers) else None,
        "torch": (info.get("versions") or {}).get("torch"),
        "revision": (info.get("git_revision") or "")[:12] or None,
    }
    return [(name, str(value)) for name, value in facts.items() if value is not None]


def _forward_text(info: Mapping[str, Any]) -> str | None:
    """Return a description of a run that does not train; None for a training."""
    config = info.get("config") or {}
    if config.get("mode") != "forward":
        return None
    return f"forward, no training: {describe_forward(ForwardConfig.model_validate(config.get('forward') or {}))}"


def _samples_text(data: Mapping[str, Any], *, trains: bool) -> str | None:
    if not data.get("train_samples"):
        return None
    samples = f"{data['train_samples']:,}"
    return f"{samples} for training, {data['eval_samples']:,} for evaluation" if trains else samples


def _four_digits(value: float | None) -> str | None:
    return None if value is None else f"{value:.4g}"


def _moment(text: str | None) -> str | None:
    return None if text is None else datetime.fromisoformat(text).strftime("%Y-%m-%d %H:%M:%S %Z")


def _duration(info: Mapping[str, Any]) -> str | None:
    if not info.get("started") or not info.get("ended"):
        return None
    took = datetime.fromisoformat(info["ended"]) - datetime.fromisoformat(info["started"])
    return str(took)


def _alerts(tables: PageTables) -> list[dict[str, Any]]:
    """Return the problems shown at the top of the page, the most severe ones first. Firings of rules are findings."""
    info = tables.info
    found: list[dict[str, Any]] = []
    if info["status"] == "stopped":
        found.append(_alert("stopped", f"The run was stopped before its last step: {info.get('error')}", "warning"))
    elif info.get("error") and info["status"] != "interrupted":
        found.append(_alert(info["status"], info["error"]))
    elif info["status"] in OUTCOMES:
        found.append(_alert(info["status"], OUTCOMES[info["status"]], "warning"))
    if info.get("recording_stopped"):
        found.append(_alert("recording", info["recording_stopped"]))
    events = tables.events[~tables.events["rule"].isin(rule_names(info))]
    shown = [event for event in _rows(events) if event["severity"] in ("error", "warning")]
    shown_messages = {alert["message"] for alert in found}
    shown.sort(key=lambda event: event["severity"])
    found += [event for event in shown if event["message"] not in shown_messages]
    if len(found) > MOST_ALERTS:
        rest = f"{len(found) - MOST_ALERTS} more warnings are listed under Events"
        found = [*found[:MOST_ALERTS], _alert("events", rest, "warning")]
    return [*(_alert("files", problem) for problem in tables.problems), *found]


def _alert(rule: str, message: str, severity: str = "error") -> dict[str, Any]:
    return {"severity": severity, "rule": rule, "message": message, "step": None}


def _rows(events: pd.DataFrame) -> list[dict[str, Any]]:
    """Return events as dictionaries with integer steps and None for missing values."""
    plain = events.astype(object).where(events.notna(), None)
    rows = [{str(name): cell for name, cell in event.items()} for event in plain.to_dict("records")]
    return [{**row, "step": None if row["step"] is None else int(row["step"])} for row in rows]


def _events(events: pd.DataFrame) -> list[dict[str, Any]]:
    return _rows(events.head(MOST_EVENTS))


def _coverage(coverage: pd.DataFrame) -> list[dict[str, Any]]:
    """Return one row per hook: expected and actual firings over all ranks, and reasons for missing firings."""
    rows = []
    for hook, sites in coverage.groupby("hook", sort=False):
        causes: dict[str, list[str]] = {}
        for site in sites.to_dict("records"):
            if site["cause"] and (site["fired"] < site["expected"] or not site["expected"]):
                causes.setdefault(site["cause"], []).append(location_name(site["layer"], site["path"], site["kind"]))
        rows.append(
            {
                "hook": hook,
                "kind": sites["kind"].iloc[0],
                "role": sites["role"].iloc[0],
                "locations": len(sites.drop_duplicates(["layer", "path"])),
                "expected": int(sites["expected"].sum()),
                "fired": int(sites["fired"].sum()),
                "causes": [(cause, _some(list(dict.fromkeys(locations)))) for cause, locations in causes.items()],
            }
        )
    return rows


def _some(locations: list[str]) -> str:
    rest = len(locations) - MOST_PLACES
    return ", ".join(locations[:MOST_PLACES]) + (f" and {rest} more" if rest > 0 else "")


def _tree(layers: pd.DataFrame) -> dict[str, Any] | None:
    """Return the module tree as nested dictionaries; None if no modules were recorded."""
    nodes: dict[str, dict[str, Any]] = {}
    for row in layers.to_dict("records"):
        name = row["layer"]
        nodes[name] = {
            "name": name.rpartition(".")[2] or ".",
            "type": row["module_type"],
            "parameters": row["parameters"],
            "trainable": row["trainable"],
            "hooks": list(row["hooks"]),
            "children": [],
        }
        if name:
            above = name.rpartition(".")[0]
            nodes[above if above in nodes else ""]["children"].append(nodes[name])
    return nodes.get("")


def _colours(layers: pd.DataFrame) -> dict[str, str]:
    hooks = dict.fromkeys(hook for names in layers["hooks"] for hook in names)
    return {hook: CATEGORIES[i % len(CATEGORIES)] for i, hook in enumerate(hooks)}


def _intervention_settings(info: Mapping[str, Any]) -> dict[str, str]:
    """Return the settings of each intervention as one line."""
    hooks = (info.get("config") or {}).get("hooks") or {}
    if not isinstance(hooks, Mapping):
        hooks = {str(spec.get("name")): spec for spec in hooks}
    return {
        name: " ".join(
            str(value) if key == "action" else f"{key} {value}"
            for key, value in spec.items()
            if key not in NOT_SETTINGS
        )
        for name, spec in hooks.items()
        if isinstance(spec, Mapping)
    }
