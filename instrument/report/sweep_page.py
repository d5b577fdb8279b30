"""The page of several runs: its texts, its tables, the data of its charts, and the effects of interventions and keys."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pandas as pd

from ..analysis.config_comparison import HOOKS, RunMatch, comparable_keys, differing_keys, match_runs, trainings
from ..analysis.config_fields import differing_fields, to_yaml
from ..analysis.config_key_effects import CONFIDENCE, adjusted, student
from ..analysis.load import Run, load
from ..analysis.plot_data import KEYS, RecordedSeries, forward_order, matrices, series_in, statistics_in
from ..analysis.run_history import history_of
from ..analysis.run_tables import RunTables
from ..errors import InstrumentError
from ..fields.pip_extras import packages_of
from ..formatting import format_number, shorten
from ..plot.compare import is_number, is_rate
from ..storage.run_search import REPORT_FILE
from ..tables.statistics import ALL
from .charts import metric_curves, rounded
from .panels import SWEEP_PANELS, panels

METRICS = ("loss", "accuracy")
MAX_CURVE_VALUES = 1_200  # maximum number of values of the curves of a run
MAX_VALUES = 400_000  # maximum number of values of all layers and runs together
PREFERRED_STATISTICS = (
    *("l2", "std", "rms", "abs_max", "mean"),
    *("zero_fraction", "dead_fraction", "update_ratio", "nan_count"),
)
SUMMARIES = {"last": "at the last step", "largest": "largest over the run", "smallest": "smallest over the run"}
Summaries = dict[RecordedSeries, dict[str, pd.DataFrame]]
"""The last, largest and smallest number by location, for each series and statistic of a run."""
MAX_ALERTS = 8
NO_ERROR_MESSAGE = "no error message was recorded"
PARTS = {"runs": "Runs", "against": "By override", "training": "Training", "layers": "Layers", "effects": "Effects"}
PARTS_IN_PROGRESS = ("runs", "against", "training")


@dataclass(frozen=True)
class PageRow:
    """One run of the page, which may be in progress."""

    name: str  # the folder, relative to that of the sweep
    status: str
    overrides: Mapping[str, Any]  # by key, and the seed if the run was started
    metrics: Mapping[str, Any] = field(default_factory=dict)  # of the last evaluation
    shown: Mapping[str, float | None] = field(default_factory=dict)  # the metrics in the table
    curves: Mapping[str, Any] = field(default_factory=dict)  # see `metric_curves`
    note: str = ""  # an error, or the number of warnings
    page: str | None = None  # the address of the page of the run
    step: str = ""  # the number of steps of a run in progress
    summaries: Summaries = field(default_factory=dict)
    problems: Sequence[str] = ()  # files that cannot be read


def page(
    rows: Sequence[PageRow], keys: Sequence[str], folder: Path | str, names: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the template, and the data of the charts, without those that only finished sweeps have.

    `keys` are the overrides in which the runs differ, `names` the names of the experiments.
    """
    with packages_of("analysis", "the report of a sweep"):
        from scipy.special import stdtrit

    overrides = [key for key in keys if key != "seed"]  # the table has a separate column for the seed
    metrics = [name for name in METRICS if any(row.shown.get(name) is not None for row in rows)]
    states = Counter(row.status for row in rows)
    words = {
        "title": f"{shorten([*dict.fromkeys(names)], 3) or 'sweep'}: {len(rows)} runs",
        "facts": [
            ("runs", ", ".join(f"{count} {status}" for status, count in states.items())),
            ("overrides that differ", ", ".join(keys) or "none"),
            ("folder", str(folder)),
        ],
        "alerts": [],
        "parts": [(part, PARTS[part]) for part in PARTS_IN_PROGRESS],
        "panels": {},
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
            "overrides": {key: value if is_number(value := row.overrides.get(key)) else to_yaml(value) for key in keys},
            # A number that is not finite is a text.
            "metrics": {
                key: rounded(value) if math.isfinite(value) else str(value)
                for key, value in row.metrics.items()
                if isinstance(value, int | float)
            },
        }
        for row in rows
    ]
    curves = [row.curves for row in rows]
    rates = [key for key in keys if is_rate(key, [row.overrides.get(key) for row in rows])]
    students = rounded(stdtrit(np.arange(1, len(rows)), (1 + CONFIDENCE) / 2))  # of means over 2, 3, ... runs
    numbers = {"runs": runs, "overrides": keys, "rates": rates, "students": students, "curves": curves}
    return words, {**numbers, "series": [], "ends": {}}


def content(run: Run) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of the template, and the data of the charts."""
    order = forward_order(load(run.folders[0]))
    runs = zip(run.names, run.folders, run.infos, run.overrides, strict=True)
    rows = [_row(*each, order) for each in runs]  # only the tables of one run are in memory
    keys = differing_keys(run.overrides)
    if "seed" not in keys and len({info["seed"] for info in run.infos}) > 1:
        keys.append("seed")
    words, numbers = page(rows, keys, run.path, [str(info.get("name")) for info in run.infos])
    effect_rows, unpaired = effects(run, words["metrics"])
    more = {
        "alerts": _alerts(run, rows),
        "pairs": effect_rows,
        "unpaired": unpaired,
        "intervals": sum(bool(row["interval"]) for row in effect_rows),
        "parts": list(PARTS.items()),
        "panels": panels(run, SWEEP_PANELS),
    }
    known = list(dict.fromkeys(series for row in rows for series in row.summaries))
    room = MAX_VALUES // max(1, len(known))
    layers = [_layers(series, [row.summaries.get(series, {}) for row in rows], room) for series in known]
    return words | more, numbers | {"series": layers, "ends": SUMMARIES}


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
        summaries=_summaries(run, order),
        problems=run.problems,
    )


def _alerts(run: Run, rows: Sequence[PageRow]) -> list[dict[str, Any]]:
    states = zip(run.names, run.infos, strict=True)
    failed = [(name, info) for name, info in states if info["status"] not in ("done", "running")]
    shown = failed[:MAX_ALERTS]
    alerts = [(info["status"], f"{name}: {info.get('error') or NO_ERROR_MESSAGE}") for name, info in shown]
    if len(failed) > MAX_ALERTS:
        rest = f"{len(failed) - MAX_ALERTS} more runs did not finish: the table below lists all of them"
        alerts.append(("runs", rest))
    alerts += [("files", f"{row.name}/{problem}") for row in rows for problem in row.problems]
    return [{"severity": "error", "rule": rule, "message": message} for rule, message in alerts]


def _override_text(overrides: Mapping[str, Any], key: str) -> str:
    """Return an override as text; null for a field of a mapping that is null, and empty without an override."""
    parents = key.split(".")
    removed = any(overrides.get(".".join(parents[:count]), "") is None for count in range(1, len(parents)))
    return to_yaml(overrides[key]) if key in overrides else "null" if removed else ""


def _summaries(run: Run, order: Sequence[str]) -> Summaries:
    """Return the last, largest and smallest number of each statistic of a run at each location."""
    stats = run.read("stats", [*KEYS, "layer", "path", "step", "recompute", *ALL, *run.custom_statistics])
    summaries: Summaries = {}
    for series in series_in(stats):
        rows = series.of(stats)
        for name, table in matrices(rows, statistics_in(rows), order, max(1, len(rows))).items():
            values = pd.DataFrame(table.values, index=table.locations)
            ends = {"last": values.iloc[:, -1], "largest": values.max(axis=1), "smallest": values.min(axis=1)}
            summaries.setdefault(series, {})[name] = pd.DataFrame(ends)
    return summaries


def _layers(series: RecordedSeries, runs: Sequence[dict[str, pd.DataFrame]], room: int) -> dict[str, Any]:
    locations = list(dict.fromkeys(location for run in runs for table in run.values() for location in table.index))
    there = dict.fromkeys(name for run in runs for name in run)
    statistics = [name for name in dict.fromkeys((*PREFERRED_STATISTICS, *ALL, *there)) if name in there]
    kept = statistics[: max(1, room // max(1, len(SUMMARIES) * len(locations) * len(runs)))]
    none = pd.DataFrame(np.nan, index=locations, columns=list(SUMMARIES))
    values = {}
    for name in kept:
        tables = [run[name].reindex(locations) if name in run else none for run in runs]
        values[name] = {summary: rounded(np.array([table[summary] for table in tables])) for summary in SUMMARIES}
    about = {"label": series.label, "gradient": series.is_gradient}
    return {**about, "locations": locations, "statistics": values, "left_out": statistics[len(kept) :]}


Pair = tuple[str, RunMatch]
"""An intervention or a key, and two runs. `value` is a text: the settings of the intervention, or the compared values of the key."""


def pairs(run: RunTables) -> list[Pair]:
    """Return all pairs with and without an intervention; record hooks do not change training and are ignored."""
    all_trainings, _ = trainings(run)
    by_identity: dict[str, list[int]] = {}
    values: dict[str, list[Mapping[str, Any]]] = {}
    for training in all_trainings:
        by_identity.setdefault(training.identity, []).append(training.index)
        for name, settings in training.interventions.items():
            values.setdefault(name, []).append(settings)
    return [
        (name, RunMatch(_settings_text(name, settings, values[name]), training.index, control, training.seed))
        for training in all_trainings
        for name, settings in training.interventions.items()
        for control in by_identity.get(training.without([HOOKS, name]), [])
    ]


def _settings_text(name: str, settings: Mapping[str, Any], values: Sequence[Mapping[str, Any]]) -> str:
    fields = differing_fields(name, settings, values)
    shown = settings if fields == {name: settings} else fields
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in shown.items()}
    return ", ".join(f"{key.removeprefix(f'{name}.')}: {text}" for key, text in texts.items())


def effects(run: Run, metrics: Sequence[str]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Return the effects on each metric: mean paired difference, interval, and all differences.

    An effect survives if its p-value, adjusted for the number of effects, is below 5%. There is one row per intervention or value of a key,
    and metric. The second result are the keys in which runs differ, but of which no two runs differ in nothing else, each with the reason.
    """
    unpaired: dict[str, str] = {}
    all_pairs = pairs(run)
    known = {(pair.baseline, pair.index) for _, pair in all_pairs}
    all_pairs += [each for each in _pairs_of_keys(run, unpaired) if (each[1].baseline, each[1].index) not in known]
    groups: dict[tuple[str, str], list[RunMatch]] = {}
    for name, pair in all_pairs:
        groups.setdefault((name, pair.value), []).append(pair)
    rows = []
    numbers = [info["metrics"] for info in run.infos]
    for (hook, settings), members in groups.items():
        for metric in metrics:
            ends = [(pair.seed, *(numbers[at].get(metric) for at in (pair.baseline, pair.index))) for pair in members]
            complete = [end for end in ends if None not in end]
            if complete:
                row = {"hook": hook, "settings": settings, "metric": metric, "count": len(complete)}
                rows.append({**row, **_paired(pd.DataFrame(complete, columns=["seed", "without", "treated"]))})
    limits = adjusted(np.array([row["p_value"] for row in rows], float)) < 1 - CONFIDENCE
    return [{**row, "survives": bool(survives)} for row, survives in zip(rows, limits, strict=True)], unpaired


def _pairs_of_keys(run: Run, unpaired: dict[str, str]) -> Iterator[Pair]:
    for key in comparable_keys(run, trainings(run)[0]):
        try:
            comparison = match_runs(run, key)
        except InstrumentError as error:
            unpaired[key] = str(error).partition("\n")[2].partition("\n")[0].strip() or str(error)
            continue
        for match in comparison.matches:
            baseline = _value_text(run, key, match.baseline, comparison.baseline)
            settings = f"{_value_text(run, key, match.index, match.value)} compared with {baseline}"
            yield key, replace(match, value=settings)


def _value_text(run: Run, key: str, index: int, value: Any) -> str:
    """Return the value of a key in a run; of a mapping, the fields in which the runs differ."""
    start = f"{key}."
    fields = {name: item for name, item in run.overrides[index].items() if name.startswith(start)}
    if fields and isinstance(run.infos[index]["overrides"].get(key), dict):
        return ", ".join(f"{name.removeprefix(start)}: {to_yaml(item)}" for name, item in fields.items())
    return value if isinstance(value, str) else to_yaml(value)


def _paired(pairs: pd.DataFrame) -> dict[str, Any]:
    """Return the means without and with an intervention, and of the difference, with its interval over the seeds."""
    pairs = pairs.assign(difference=pairs["treated"] - pairs["without"])
    seeds = pd.DataFrame([rows.mean(skipna=False) for _, rows in pairs.groupby("seed")])  # keeps NaN of a diverged run
    means = seeds.mean(skipna=False)
    squares = ((seeds["difference"] - means["difference"]) ** 2).sum(skipna=False)
    width, p_value = student(np.array(means["difference"]), np.array(squares), np.array(len(seeds)))
    ends = [format_number(means["difference"] + side * width, sign=True) for side in (-1, 1)]
    return {
        "without": format_number(means["without"]),
        "treated": format_number(means["treated"]),
        "difference": format_number(means["difference"], sign=True),
        "interval": "" if np.isnan(width) else f"{ends[0]} to {ends[1]}",
        "p_value": float(p_value),
        "each": "  ".join(format_number(difference, sign=True) for difference in pairs["difference"]),
    }
