"""Texts and tables of the page of several runs; `instrument.report.sweep_charts` prepares the charts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd

from ..analysis.confidence_interval import CONFIDENCE, adjusted, half_width, p_values
from ..analysis.config_comparison import to_yaml
from ..analysis.load import Run
from ..analysis.runs_with_and_without import Pair, pairs
from .command import FILE
from .numbers import format_number
from .sweep_charts import RunData, charts, name_of, overrides_of, read_runs

METRICS = ("loss", "accuracy")
MOST_ALERTS = 8
NO_ERROR_MESSAGE = "no error message was recorded"
PARTS = {
    "runs": "Runs",
    "against": "By override",
    "patching": "By location",
    "training": "Training",
    "layers": "Layers",
    "effects": "Interventions",
}


def content(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the template, and the data of the charts."""
    run_data = read_runs(run)
    overrides = overrides_of(run)
    metrics = [name for name in METRICS if any(info["metrics"].get(name) is not None for info in run.infos)]
    states = Counter(str(info["status"]) for info in run.infos)
    names = dict.fromkeys(str(info.get("name")) for info in run.infos)
    shown = [key for key in overrides if key != "seed"]  # the table has a separate column for the seed
    words = {
        "title": f"{', '.join(names)}: {len(run.folders)} runs",
        "facts": [
            ("runs", ", ".join(f"{count} {status}" for status, count in states.items())),
            ("overrides that differ", ", ".join(overrides) or "none"),
            ("folder", str(run.path)),
        ],
        "alerts": _alerts(run, run_data),
        "overrides": shown,
        "metrics": metrics,
        "rows": _rows(run, run_data, shown, metrics),
        "pairs": (effects := _effects(run, metrics)),
        "intervals": sum(bool(row["interval"]) for row in effects),
        "parts": list(PARTS.items()),
    }
    return words, charts(run, run_data)


def _alerts(run: Run, run_data: Sequence[RunData]) -> list[dict[str, Any]]:
    """Return the first failed runs with their errors, and all unreadable files."""
    bad = [
        {
            "severity": "error",
            "rule": info["status"],
            "message": f"{name_of(run, folder)}: {info.get('error') or NO_ERROR_MESSAGE}",
        }
        for folder, info in zip(run.folders, run.infos, strict=True)
        if info["status"] not in ("done", "running")
    ]
    if len(bad) > MOST_ALERTS:
        rest = f"{len(bad) - MOST_ALERTS} more runs did not finish: the table below lists all of them"
        bad = [*bad[:MOST_ALERTS], {"severity": "error", "rule": "runs", "message": rest}]
    damaged = [
        {"severity": "error", "rule": "files", "message": f"{name_of(run, folder)}/{problem}"}
        for folder, data in zip(run.folders, run_data, strict=True)
        for problem in data.problems
    ]
    return bad + damaged


def _rows(run: Run, run_data: Sequence[RunData], shown: list[str], metrics: list[str]) -> list[dict[str, Any]]:
    rows = []
    for folder, info, data in zip(run.folders, run.infos, run_data, strict=True):
        asked = {"seed": info["seed"], **info["overrides"]}
        rows.append(
            {
                "name": name_of(run, folder),
                "page": quote(f"{name_of(run, folder)}/{FILE}") if (folder / FILE).exists() else None,
                "status": info["status"],
                "seed": info["seed"],
                "overrides": [to_yaml(asked[key]) if key in asked else "" for key in shown],
                "metrics": [format_number(info["metrics"].get(name)) for name in metrics],
                "note": info.get("error") or (str(data.warnings) if data.warnings else ""),
            }
        )
    return rows


def _effects(run: Run, metrics: list[str]) -> list[dict[str, Any]]:
    """Return the effect of each intervention on each metric: mean paired difference, interval, and all differences.

    An effect survives if its p-value, adjusted for the number of intervals, is below 5%.
    """
    groups: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs(run):
        groups.setdefault((pair.hook, pair.settings), []).append(pair)
    rows = []
    for (hook, settings), members in groups.items():
        for metric in metrics:
            ends = [
                (p.seed, run.infos[p.control]["metrics"].get(metric), run.infos[p.treated]["metrics"].get(metric))
                for p in members
            ]
            known = [(seed, *both) for seed, *both in ends if None not in both]
            if known:
                row = {"hook": hook, "settings": settings, "metric": metric, "count": len(known)}
                rows.append({**row, **_paired(pd.DataFrame(known, columns=["seed", "without", "treated"]))})
    limits = adjusted(np.array([row["p_value"] for row in rows], float)) < 1 - CONFIDENCE
    return [{**row, "survives": bool(survives)} for row, survives in zip(rows, limits, strict=True)]


def _paired(pairs: pd.DataFrame) -> dict[str, Any]:
    """Return the means without and with an intervention, and of the difference, with its interval over the seeds."""
    pairs = pairs.assign(difference=pairs["treated"] - pairs["without"])
    seeds = pd.DataFrame([rows.mean(skipna=False) for _, rows in pairs.groupby("seed")])  # keeps NaN of a diverged run
    means = seeds.mean(skipna=False)
    squares = ((seeds["difference"] - means["difference"]) ** 2).sum(skipna=False)
    numbers = (np.array(squares), np.array(len(seeds)))
    width = float(half_width(*numbers))
    ends = [format_number(means["difference"] + side * width, sign=True) for side in (-1, 1)]
    return {
        "without": format_number(means["without"]),
        "treated": format_number(means["treated"]),
        "difference": format_number(means["difference"], sign=True),
        "interval": "" if math.isnan(width) else f"{ends[0]} to {ends[1]}",
        "p_value": float(p_values(np.array(means["difference"]), *numbers)),
        "each": "  ".join(format_number(difference, sign=True) for difference in pairs["difference"]),
    }
