"""Data of the charts of finished runs: each run in a few numbers, and pairs of runs with and without an intervention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..analysis.config_comparison import differing_keys
from ..analysis.load import Run, load
from ..analysis.plot_data import KEYS, RecordedSeries, forward_order, matrices, series_in, statistics_in
from ..spec.statistics import ALL
from .charts import metric_curves
from .numbers import rounded
from .run_history import history_of
from .sweep_effects import pairs

MAX_CURVE_VALUES = 1_200  # maximum number of values of the curves of a run
MAX_VALUES = 400_000  # maximum number of values of all layers and runs together
PREFERRED_STATISTICS = (
    *("l2", "std", "rms", "abs_max", "mean"),
    *("zero_fraction", "dead_fraction", "update_ratio", "nan_count"),
)
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
        curves = metric_curves(history_of(run, ("metrics",), MAX_CURVE_VALUES))
        return cls(curves, summaries, run.problems, warnings)


def read_runs(run: Run) -> list[RunData]:
    """Read the runs one after the other, so that only the tables of one run are in memory."""
    order = forward_order(load(run.folders[0]))
    return [RunData.of(folder, order) for folder in run.folders]


def charts(run: Run, run_data: Sequence[RunData]) -> dict[str, Any]:
    """Return the data of the charts that only finished sweeps have."""
    return {
        "series": layers_of_all([part.summaries for part in run_data]),
        "pairs": [asdict(pair) for pair in pairs(run)],
        "ends": SUMMARIES,
    }


def overrides_of(run: Run) -> list[str]:
    """Return the overrides in which the runs differ, of mappings their fields, and `seed` if the seeds differ."""
    differing = differing_keys(run.overrides)
    seeds = {info["seed"] for info in run.infos}
    return differing + (["seed"] if len(seeds) > 1 and "seed" not in differing else [])


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
