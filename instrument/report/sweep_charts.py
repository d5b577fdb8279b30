"""Data of the charts of several runs: each run in a few numbers, and pairs of runs with and without an intervention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..analysis.config_comparison import differing_keys
from ..analysis.config_fields import to_yaml
from ..analysis.intervention_grid import intervention_grid, metric_of
from ..analysis.load import Run, load
from ..analysis.plot_data import KEYS, RecordedSeries, forward_order, matrices, series_in, statistics_in
from ..analysis.runs_with_and_without import pairs
from ..errors import InstrumentError
from ..spec.statistics import ALL
from .charts import curves
from .numbers import rounded

CURVE_POINTS = 200
MAX_VALUES = 400_000  # maximum number of values of all layers and runs together
PREFERRED_STATISTICS = (
    *("l2", "std", "rms", "abs_max", "mean"),
    *("zero_fraction", "dead_fraction", "update_ratio", "nan_count"),
)
LOCATIONS = ("layers", "positions", "heads.take", "units", "samples", "slice")
PATCHING_METRICS = ("loss", "accuracy")
SUMMARIES = {"last": "at the last step", "largest": "largest over the run", "smallest": "smallest over the run"}


@dataclass
class RunData:
    """The data that is kept of each of several runs after its tables were read.

    Attributes:
        curves: The metrics.
        summaries: The last, largest and smallest number by location, for each series and statistic.
        problems: Problems with the files of the run.
        warnings: Number of warnings.
    """

    curves: dict[str, Any]
    summaries: dict[RecordedSeries, dict[str, pd.DataFrame]]
    problems: list[str]
    warnings: int

    @classmethod
    def of(cls, folder: Path, order: Sequence[str]) -> RunData:
        """Read one run."""
        run = load(folder)
        stats = run.read("stats", [*KEYS, "layer", "path", "step", "recompute", *ALL, *run.custom_statistics])
        summaries = {series: _summaries(series.of(stats), order) for series in series_in(stats)}
        warnings = int((run.events["severity"] == "warning").sum())
        return cls(curves(run, CURVE_POINTS), summaries, run.problems, warnings)


def read_runs(run: Run) -> list[RunData]:
    """Read the runs one after the other, so that only the tables of one run are in memory."""
    order = forward_order(load(run.folders[0]))
    return [RunData.of(folder, order) for folder in run.folders]


def charts(run: Run, run_data: Sequence[RunData]) -> dict[str, Any]:
    """Return the data of all charts of a sweep's page."""
    return {
        "runs": _runs(run),
        "overrides": overrides_of(run),
        "curves": [part.curves for part in run_data],
        "series": layers_of_all([part.summaries for part in run_data]),
        "pairs": [asdict(pair) for pair in pairs(run)],
        "patching": patching(run),
        "ends": SUMMARIES,
    }


def patching(run: Run) -> dict[str, Any] | None:
    """Return the metrics of a sweep over the location of an intervention, as rows and columns.

    Returns:
        None if the runs do not differ in the layers, positions, heads or units of one intervention, and in nothing else.
    """
    try:
        grid = intervention_grid(run)
    except InstrumentError:
        return None
    if not grid.column_key or not {grid.row_key, grid.column_key} <= {
        f"hooks.{grid.hook}.{name}" for name in LOCATIONS
    }:
        return None
    values = {name: grid.values(partial(metric_of, run, metric=name)) for name in PATCHING_METRICS}
    return {
        "hook": grid.hook,
        "keys": [grid.row_key, grid.column_key],
        "rows": grid.rows,
        "columns": grid.columns,
        "metrics": {name: rounded(table) for name, table in values.items() if np.isfinite(table).any()},
        "difference": grid.has_baseline,
        "left": len(grid.left_out),
    }


def name_of(run: Run, folder: Path) -> str:
    """Return the path of a run relative to the opened folder."""
    return str(folder.relative_to(run.path))


def overrides_of(run: Run) -> list[str]:
    """Return the overrides in which the runs differ, of mappings their fields, and `seed` if the seeds differ."""
    differing = differing_keys(run.overrides)
    seeds = {info["seed"] for info in run.infos}
    return differing + (["seed"] if len(seeds) > 1 and "seed" not in differing else [])


def _runs(run: Run) -> list[dict[str, Any]]:
    asked = overrides_of(run)
    return [
        {
            "name": name_of(run, folder),
            "status": info["status"],
            "seed": info["seed"],
            "overrides": {key: _cell({"seed": info["seed"], **overrides}.get(key)) for key in asked},
            "metrics": {
                key: _metric(value) for key, value in info["metrics"].items() if isinstance(value, int | float)
            },
        }
        for folder, info, overrides in zip(run.folders, run.infos, run.overrides, strict=True)
    ]


def _cell(value: Any) -> float | str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return value if is_number else to_yaml(value)


def _metric(value: float) -> float | str:
    """Return a finite metric as a number, and a non-finite one as text."""
    return rounded(value) if math.isfinite(value) else str(value)


def _summaries(rows: pd.DataFrame, order: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Return the last, largest and smallest number of each statistic at each location."""
    found = {}
    for name, table in matrices(rows, statistics_in(rows), order, max(1, len(rows))).items():
        values = pd.DataFrame(table.values, index=table.locations)
        found[name] = pd.DataFrame(
            {"last": values.iloc[:, -1], "largest": values.max(axis=1), "smallest": values.min(axis=1)}
        )
    return found


def layers_of_all(runs: Sequence[dict[RecordedSeries, dict[str, pd.DataFrame]]]) -> list[dict[str, Any]]:
    """Return the statistics of each series by location, with the last, largest and smallest number of each run."""
    known = list(dict.fromkeys(series for run in runs for series in run))
    room = MAX_VALUES // max(1, len(known))
    return [_layers(series, [run.get(series, {}) for run in runs], room) for series in known]


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
