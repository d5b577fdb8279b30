"""The page of several runs: its texts and tables; `instrument.report.sweep_charts` prepares charts of finished runs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from ..analysis.config_fields import to_yaml
from ..analysis.folders import REPORT_FILE
from ..analysis.load import Run, load
from ..analysis.plot_data import forward_order
from .charts import metric_curves
from .numbers import format_number, rounded
from .panels import SWEEP_PANELS, panels
from .run_history import history_of
from .sweep_charts import MAX_CURVE_VALUES, SUMMARIES, Summaries, layers_of_all, overrides_of, summaries_of
from .sweep_effects import effects, pairs

METRICS = ("loss", "accuracy")
MAX_ALERTS = 8
NO_ERROR_MESSAGE = "no error message was recorded"
PARTS = {
    "runs": "Runs",
    "against": "By override",
    "training": "Training",
    "layers": "Layers",
    "effects": "Effects",
}


@dataclass(frozen=True)
class PageRow:
    """One run of the page.

    Attributes:
        name: The folder, relative to that of the sweep.
        status: The status of the run.
        overrides: The overrides by key, and the seed if the run was started.
        metrics: The metrics of the last evaluation, by name.
        shown: The metrics in the table, by name.
        curves: The metrics over steps; see `metric_curves`.
        note: An error, or the number of warnings.
        page: The address of the page of the run; None if it has none.
        step: The number of steps of a run in progress, as text.
        summaries: The statistics of the layers of a finished run.
        problems: The files of a finished run that cannot be read.
    """

    name: str
    status: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    shown: Mapping[str, float | None] = field(default_factory=dict)
    curves: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    page: str | None = None
    step: str = ""
    summaries: Summaries = field(default_factory=dict)
    problems: Sequence[str] = ()


def table(
    rows: Sequence[PageRow], keys: Sequence[str], folder: Path | str, names: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the template and the data of the charts that finished and running sweeps have.

    Args:
        rows: The runs.
        keys: The overrides in which the runs differ.
        folder: The folder of the sweep.
        names: The names of the experiments.
    """
    overrides = [key for key in keys if key != "seed"]  # the table has a separate column for the seed
    metrics = [name for name in METRICS if any(row.shown.get(name) is not None for row in rows)]
    states = Counter(row.status for row in rows)
    words = {
        "title": f"{', '.join(dict.fromkeys(names)) or 'sweep'}: {len(rows)} runs",
        "facts": [
            ("runs", ", ".join(f"{count} {status}" for status, count in states.items())),
            ("overrides that differ", ", ".join(keys) or "none"),
            ("folder", str(folder)),
        ],
        "overrides": overrides,
        "metrics": metrics,
        "rows": [
            {
                **{name: getattr(row, name) for name in ("name", "status", "note", "page", "step")},
                "seed": row.overrides.get("seed", ""),
                "overrides": [_override_text(row.overrides, key) for key in overrides],
                "metrics": [format_number(row.shown.get(name)) for name in metrics],
            }
            for row in rows
        ],
    }
    runs = [
        {
            "name": row.name,
            "status": row.status,
            "seed": row.overrides.get("seed"),
            "overrides": {key: _cell(row.overrides.get(key)) for key in keys},
            "metrics": {key: _number(value) for key, value in row.metrics.items() if isinstance(value, int | float)},
        }
        for row in rows
    ]
    return words, {"runs": runs, "overrides": keys, "curves": [row.curves for row in rows]}


def _number(value: float) -> float | str:
    """Return a number as JSON; a text if it is not finite."""
    number: float | str = rounded(value) if math.isfinite(value) else str(value)
    return number


def content(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the template, and the data of the charts."""
    order = forward_order(load(run.folders[0]))
    runs = zip(run.names, run.folders, run.infos, run.overrides, strict=True)
    rows = [_row(*each, order) for each in runs]  # only the tables of one run are in memory
    words, numbers = table(rows, overrides_of(run), run.path, [str(info.get("name")) for info in run.infos])
    found, unpaired = effects(run, words["metrics"])
    more = {
        "alerts": _alerts(run, rows),
        "pairs": found,
        "unpaired": unpaired,
        "intervals": sum(bool(row["interval"]) for row in found),
        "parts": list(PARTS.items()),
        "panels": panels(run, SWEEP_PANELS),
    }
    layers = layers_of_all([row.summaries for row in rows])
    charts = {"series": layers, "pairs": [asdict(pair) for pair in pairs(run)], "ends": SUMMARIES}
    return words | more, numbers | charts


def _row(
    name: str, folder: Path, info: Mapping[str, Any], overrides: Mapping[str, Any], order: Sequence[str]
) -> PageRow:
    run = load(folder)
    warnings = int((run.events["severity"] == "warning").sum())
    return PageRow(
        name,
        str(info["status"]),
        {"seed": info["seed"], **overrides},
        metrics=info["metrics"],
        shown=info["metrics"],
        curves=metric_curves(history_of(run, ("metrics",), MAX_CURVE_VALUES)),
        note=info.get("error") or (str(warnings) if warnings else ""),
        page=quote(f"{name}/{REPORT_FILE}") if (folder / REPORT_FILE).exists() else None,
        summaries=summaries_of(run, order),
        problems=run.problems,
    )


def _alerts(run: Run, rows: Sequence[PageRow]) -> list[dict[str, Any]]:
    """Return the first failed runs with their errors, and all unreadable files."""
    states = zip(run.names, run.infos, strict=True)
    failed = [(name, info) for name, info in states if info["status"] not in ("done", "running")]
    alerts = [
        (info["status"], f"{name}: {info.get('error') or NO_ERROR_MESSAGE}") for name, info in failed[:MAX_ALERTS]
    ]
    if len(failed) > MAX_ALERTS:
        rest = f"{len(failed) - MAX_ALERTS} more runs did not finish: the table below lists all of them"
        alerts.append(("runs", rest))
    alerts += [("files", f"{row.name}/{problem}") for row in rows for problem in row.problems]
    return [{"severity": "error", "rule": rule, "message": message} for rule, message in alerts]


def _cell(value: Any) -> float | str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else to_yaml(value)


def _override_text(overrides: Mapping[str, Any], key: str) -> str:
    """Return an override as text; null for a field of a mapping that is null, and empty without an override."""
    parents = key.split(".")
    removed = any(overrides.get(".".join(parents[:count]), "") is None for count in range(1, len(parents)))
    return to_yaml(overrides[key]) if key in overrides else "null" if removed else ""
