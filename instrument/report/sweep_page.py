"""Texts and tables of the page of several runs; `instrument.report.sweep_charts` prepares the charts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from ..analysis.config_fields import to_yaml
from ..analysis.load import Run
from .command import FILE
from .numbers import format_number
from .sweep_charts import RunData, charts, name_of, overrides_of, read_runs
from .sweep_effects import Comparisons

METRICS = ("loss", "accuracy")
MOST_ALERTS = 8
NO_ERROR_MESSAGE = "no error message was recorded"
PARTS = {
    "runs": "Runs",
    "against": "By override",
    "patching": "By location",
    "training": "Training",
    "layers": "Layers",
    "effects": "Effects",
}


def content(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the template, and the data of the charts."""
    run_data = read_runs(run)
    comparisons = Comparisons(run)
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
        "pairs": (effects := comparisons.rows(metrics)),
        "unpaired": comparisons.unpaired,
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
    for folder, info, overrides, data in zip(run.folders, run.infos, run.overrides, run_data, strict=True):
        asked = {"seed": info["seed"], **overrides}
        rows.append(
            {
                "name": name_of(run, folder),
                "page": quote(f"{name_of(run, folder)}/{FILE}") if (folder / FILE).exists() else None,
                "status": info["status"],
                "seed": info["seed"],
                "overrides": [_override_text(asked, key) for key in shown],
                "metrics": [format_number(info["metrics"].get(name)) for name in metrics],
                "note": info.get("error") or (str(data.warnings) if data.warnings else ""),
            }
        )
    return rows


def _override_text(overrides: Mapping[str, Any], key: str) -> str:
    """Return an override as text; null for a field of a mapping that is null, and empty without an override."""
    parents = key.split(".")
    removed = any(overrides.get(".".join(parents[:count]), "") is None for count in range(1, len(parents)))
    return to_yaml(overrides[key]) if key in overrides else "null" if removed else ""
