"""What the page of several runs is made of: each run in a few numbers, run beside run, with and without an intervention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from ..analysis.load import Run, load
from ..analysis.pairs import Pair, pairs
from ..analysis.series import Series, forward_order, matrices, series_in, statistics_in
from .charts import curves
from .numbers import rounded

CURVE_POINTS = 200
PLACES_ROOM = 400_000  # numbers of all runs' layers together
ENDS = {"last": "at the last step", "largest": "largest over the run", "smallest": "smallest over the run"}


def charts(run: Run) -> dict[str, Any]:
    """All that the charts of a sweep's page show."""
    single = [load(folder) for folder in run.folders]
    return {
        "runs": _runs(run),
        "overrides": overrides_of(run),
        "curves": [curves(one.metrics, CURVE_POINTS) for one in single],
        "series": layers_of_all(single),
        "pairs": [_pair(pair) for pair in pairs(run)],
        "ends": ENDS,
    }


def name_of(run: Run, folder: Path) -> str:
    """What a run is called among several: its folder below the one that was opened."""
    return str(folder.relative_to(run.path))


def overrides_of(run: Run) -> list[str]:
    """The overrides in which the runs differ, and the seed where it does."""
    keys = dict.fromkeys(key for info in run.infos for key in info["overrides"])
    differing = [key for key in keys if len({str(info["overrides"].get(key)) for info in run.infos}) > 1]
    seeds = {info["seed"] for info in run.infos}
    return differing + (["seed"] if len(seeds) > 1 and "seed" not in differing else [])


def _runs(run: Run) -> list[dict[str, Any]]:
    asked = overrides_of(run)
    return [
        {
            "name": name_of(run, folder),
            "status": info["status"],
            "seed": info["seed"],
            "overrides": {key: _cell({"seed": info["seed"], **info["overrides"]}.get(key)) for key in asked},
            "metrics": {
                key: _metric(value) for key, value in info["metrics"].items() if isinstance(value, int | float)
            },
        }
        for folder, info in zip(run.folders, run.infos, strict=True)
    ]


def _cell(value: Any) -> float | str:
    return value if isinstance(value, int | float) and not isinstance(value, bool) else in_yaml(value)


def _metric(value: float) -> float | str:
    """A metric, or what it is where it is no finite number."""
    return rounded(value) if math.isfinite(value) else str(value)


def in_yaml(value: Any) -> str:
    """A value as it stands on a command line or in a file: `null`, `{kind: forward, norm: 0.1}`."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def layers_of_all(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Each series' statistics by place, one number a run: at the last step, the largest and the smallest of all."""
    order = forward_order(runs[0])
    tables = [run.stats for run in runs]
    found: dict[Series, list[tuple[int, pd.DataFrame]]] = {}
    for number, table in enumerate(tables):
        for series in series_in(table):
            found.setdefault(series, []).append((number, series.of(table)))
    room = PLACES_ROOM // max(1, len(found))
    return [_layers(series, parts, order, len(runs), room) for series, parts in found.items()]


def _layers(
    series: Series, parts: list[tuple[int, pd.DataFrame]], order: Sequence[str], runs: int, room: int
) -> dict[str, Any]:
    statistics = list(dict.fromkeys(name for _, rows in parts for name in statistics_in(rows)))
    matrix = {number: matrices(rows, statistics, order, len(rows)) for number, rows in parts if len(rows)}
    places = list(dict.fromkeys(place for tables in matrix.values() for place in tables[statistics[0]].places))
    kept = statistics[: max(1, room // max(1, len(ENDS) * len(places) * runs))]
    values: dict[str, dict[str, Any]] = {}
    for name in kept:
        ends = {end: np.full((runs, len(places)), np.nan) for end in ENDS}
        for number, tables in matrix.items():
            at = [places.index(place) for place in tables[name].places]
            for end, numbers in _ends(tables[name].values).items():
                ends[end][number, at] = numbers
        values[name] = {end: rounded(numbers) for end, numbers in ends.items()}
    about = {"label": series.label, "gradient": series.is_gradient}
    return {**about, "places": places, "statistics": values, "left_out": statistics[len(kept) :]}


def _ends(values: np.ndarray) -> dict[str, np.ndarray]:
    """Of each place's row of numbers the last, the largest and the smallest that there is; NaN where there is none."""
    frame = pd.DataFrame(values)
    return {
        "last": frame.ffill(axis=1).iloc[:, -1].to_numpy(),
        "largest": frame.max(axis=1).to_numpy(),
        "smallest": frame.min(axis=1).to_numpy(),
    }


def _pair(pair: Pair) -> dict[str, Any]:
    return {
        "hook": pair.hook,
        "settings": pair.settings,
        "treated": pair.treated,
        "control": pair.control,
        "seed": pair.seed,
    }
