"""Data of the charts of layers of finished runs: each run in a few numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from ..analysis.config_comparison import differing_keys
from ..analysis.load import Run
from ..analysis.plot_data import KEYS, RecordedSeries, matrices, series_in, statistics_in
from ..spec.statistics import ALL
from .numbers import rounded

MAX_CURVE_VALUES = 1_200  # maximum number of values of the curves of a run
MAX_VALUES = 400_000  # maximum number of values of all layers and runs together
PREFERRED_STATISTICS = (
    *("l2", "std", "rms", "abs_max", "mean"),
    *("zero_fraction", "dead_fraction", "update_ratio", "nan_count"),
)
SUMMARIES = {"last": "at the last step", "largest": "largest over the run", "smallest": "smallest over the run"}


Summaries = dict[RecordedSeries, dict[str, pd.DataFrame]]
"""The last, largest and smallest number by location, for each series and statistic of a run."""


def overrides_of(run: Run) -> list[str]:
    """Return the overrides in which the runs differ, of mappings their fields, and `seed` if the seeds differ."""
    differing = differing_keys(run.overrides)
    seeds = {info["seed"] for info in run.infos}
    return differing + (["seed"] if len(seeds) > 1 and "seed" not in differing else [])


def summaries_of(run: Run, order: Sequence[str]) -> Summaries:
    """Return the summaries of one run.

    Args:
        run: The run.
        order: Layer names in forward order.
    """
    stats = run.read("stats", [*KEYS, "layer", "path", "step", "recompute", *ALL, *run.custom_statistics])
    return {series: _summaries(series.of(stats), order) for series in series_in(stats)}


def _summaries(rows: pd.DataFrame, order: Sequence[str]) -> dict[str, pd.DataFrame]:
    """Return the last, largest and smallest number of each statistic at each location."""
    found = {}
    for name, table in matrices(rows, statistics_in(rows), order, max(1, len(rows))).items():
        values = pd.DataFrame(table.values, index=table.locations)
        ends = {"last": values.iloc[:, -1], "largest": values.max(axis=1), "smallest": values.min(axis=1)}
        found[name] = pd.DataFrame(ends)
    return found


def layers_of_all(runs: Sequence[Summaries]) -> list[dict[str, Any]]:
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
