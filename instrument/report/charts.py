"""Data of the charts of one run, grouped by steps to limit the size of the page."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from ..analysis.load import Run
from ..analysis.plot_data import (
    Matrix,
    RecordedSeries,
    StepGroups,
    forward_order,
    groups_of,
    joined_statistics,
    matrices,
    row_locations,
    series_in,
    statistics_in,
)
from ..analysis.series_selection import evenly_spaced
from ..rules.step_rows import location_name
from .attention_pictures import attention, attention_layers
from .numbers import rounded
from .pictures import maps

STATISTICS_ROOM = 500_000  # maximum number of values in all heat maps together
FEWEST, MOST = 10, 1_000  # limits of the number of groups of steps in a heat map
CURVE_POINTS = 1_000
HISTOGRAM_ROOM, HISTOGRAM_STEPS = 120_000, 40
EFFECTS_ROOM = 60_000
EFFECTS = ("norm_before", "norm_after", "changed_fraction")
MIDDLE = 0.5
METRICS = ("loss", "accuracy", "grad_norm", "lr", "samples_per_second", "seconds")
CURVE_KEYS = ("first", "last", "groups", "bad")  # of the data of a curve, next to the metrics


def charts(run: Run) -> dict[str, Any]:
    """Return the data of all charts of one run's page."""
    order = forward_order(run)
    stats, recorded = joined_statistics(run), run.distributions
    layers = attention_layers(run, order)
    return {
        "series": heat_maps(stats, order) + heat_maps(_without_statistics(stats, recorded), order),
        "distributions": distributions(recorded),
        "metrics": curves(run),
        "acted": firing_ranges(run.effects),
        "alerts": alerts(run.events, run.info),
        "effects": effects(run.effects, order),
        "attention": attention(run, layers),
        "maps": maps(run, order, {(each.tensor.series, each.tensor.location) for each in layers}),
    }


def heat_maps(stats: pd.DataFrame, order: Sequence[str]) -> list[dict[str, Any]]:
    """Return every statistic of every series by location and group of steps."""
    found = [(series, series.of(stats)) for series in series_in(stats)]
    sizes = [rows[["layer", "path"]].drop_duplicates().shape[0] * len(statistics_in(rows)) for _, rows in found]
    most = int(np.clip(STATISTICS_ROOM // max(1, sum(sizes)), FEWEST, MOST))
    return [_heat_map(series, rows, order, most) for series, rows in found if statistics_in(rows)]


def _without_statistics(stats: pd.DataFrame, recorded: pd.DataFrame) -> pd.DataFrame:
    """Return distributions without statistics in the format of the stats table: minimum, maximum and median."""
    where = ["kind", "role", "phase"]
    measured = pd.MultiIndex.from_frame(stats[where].drop_duplicates())
    alone = recorded[~pd.MultiIndex.from_frame(recorded[where]).isin(measured)]
    medians = [_median(*cells) for cells in zip(alone["levels"], alone["quantiles"], strict=True)]
    named = alone.rename(columns={"low": "min", "high": "max"})
    return named.assign(median=pd.Series(medians, alone.index, dtype=np.float64))


def _median(levels: Sequence[float] | None, quantiles: Sequence[float] | None) -> float | None:
    if levels is None or quantiles is None or MIDDLE not in levels:
        return None
    return quantiles[list(levels).index(MIDDLE)]


def _heat_map(series: RecordedSeries, rows: pd.DataFrame, order: Sequence[str], most: int) -> dict[str, Any]:
    statistics = statistics_in(rows)
    tables = matrices(rows, statistics, order, most)
    axes = tables[statistics[0]]
    return {
        **about(series),
        **_steps(axes),
        "locations": axes.locations,
        "several": bool(rows.duplicated(["layer", "path", "step"]).any()),
        "types": dict(zip(row_locations(rows, order).astype(str), rows["module_type"], strict=True)),
        "statistics": {name: rounded(table.values) for name, table in tables.items()},
    }


def about(series: RecordedSeries) -> dict[str, Any]:
    """Return the label and the properties of a series."""
    return {
        "label": series.label,
        "hook": series.hook,
        "kind": series.kind,
        "role": series.role,
        "phase": series.phase,
        "gradient": series.is_gradient,
        "parameters": series.is_of_parameters,
    }


def distributions(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the recorded quantiles and histograms of every location at some of its steps."""
    found = []
    kept = frame[~frame["recompute"].astype(bool)]
    locations = kept.groupby(["hook", "kind", "role", "phase", "layer", "path"], sort=False)
    room = max(1, HISTOGRAM_ROOM // max(1, len(locations)))
    for at, rows in locations:
        hook, kind, role, phase, layer, path = map(str, at)
        numbers = rows.iloc[0][["counts", "quantiles"]].map(lambda cell: 0 if cell is None else len(cell)).sum()
        first = rows.drop_duplicates("step")  # histograms of several calls cannot be merged
        some = first.iloc[evenly_spaced(len(first), min(HISTOGRAM_STEPS, max(2, room // max(1, int(numbers)))))]
        found.append(
            {
                **about(RecordedSeries(hook, kind, role, phase)),
                "location": location_name(layer, path, kind),
                "of": len(first),
                "several": bool(rows["step"].duplicated().any()),
                "steps": some["step"].tolist(),
                "levels": rounded(_as_lists(some["levels"])),
                "quantiles": rounded(_as_lists(some["quantiles"])),
                "low": rounded(some["low"].to_numpy(np.float64)),
                "high": rounded(some["high"].to_numpy(np.float64)),
                "counts": _as_lists(some["counts"]),
            }
        )
    return found


def _as_lists(cells: pd.Series) -> list[list[float] | None]:
    return [None if cell is None else np.asarray(cell).tolist() for cell in cells]


def curves(run: Run, most: int = CURVE_POINTS) -> dict[str, Any]:
    """Return the metrics of each phase over steps; a group of steps has the mean of its finite values.

    `bad` has, for each metric, the steps at which the metric was recorded but is not finite.
    """
    names = [*METRICS, *(name for name in run.custom_metrics if name not in CURVE_KEYS)]
    batches = list(run.scan("metrics", ["step", "phase", *names]))
    if not batches:
        return {}
    table = pa.Table.from_batches(batches)
    there = {name: table[name].is_valid().to_numpy() for name in names}  # pandas does not distinguish NaN from null
    metrics: pd.DataFrame = table.to_pandas()
    metrics["phase"] = metrics["phase"].astype(str)
    finite = np.isfinite(metrics[names].to_numpy(np.float64))
    bad = pd.DataFrame({name: there[name] & ~finite[:, i] for i, name in enumerate(names)})
    known = metrics.assign(**metrics[names].where(finite))
    found = {}
    for phase, rows in known.groupby("phase", sort=False):
        groups = groups_of(rows["step"], most)
        means = rows.groupby(rows["step"].map(groups.number))[names].mean()
        lost = {name: rows.loc[bad.loc[rows.index, name], "step"].drop_duplicates().tolist() for name in names}
        found[str(phase)] = {
            **_steps(groups),
            **{name: rounded(means[name].to_numpy()) for name in names if means[name].notna().any() or lost[name]},
            "bad": {name: [steps[i] for i in evenly_spaced(len(steps), most)] for name, steps in lost.items() if steps},
        }
    return found


def _steps(axis: StepGroups | Matrix) -> dict[str, Any]:
    return {"first": axis.first.tolist(), "last": axis.last.tolist()}


def firing_ranges(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the steps at which each intervention fired and its condition held, as ranges of consecutive steps."""
    found = []
    for hook, rows in frame[frame["held"].ne(False)].groupby("hook", sort=False):
        groups = groups_of(rows["step"], CURVE_POINTS)
        stretches = zip(groups.first.tolist(), groups.last.tolist(), strict=True)
        found.append({"hook": hook, "steps": merge_ranges(stretches), "count": len(groups.number)})
    return found


def merge_ranges(stretches: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Merge adjacent ranges."""
    whole: list[list[int]] = []
    for begin, end in stretches:
        if whole and begin <= whole[-1][1] + 1:
            whole[-1][1] = end
        else:
            whole.append([begin, end])
    return whole


def alerts(events: pd.DataFrame, info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return warnings, errors and all firings of rules that belong to a step, each with its lane in the chart.

    Args:
        events: The table `events`.
        info: The content of run.json.
    """
    is_shown = events["severity"].isin(["warning", "error"]) | events["value"].notna()
    shown = events[is_shown & events["step"].notna()]
    rules = rule_names(info)
    return [
        {
            "step": int(row["step"]),
            "rule": row["rule"],
            "message": row["message"],
            "severity": row["severity"],
            "lane": "rules" if row["rule"] in rules else "alerts",
        }
        for row in shown.to_dict("records")
    ]


def rule_names(info: Mapping[str, Any]) -> Collection[str]:
    """Return the names of the rules of a run.

    Args:
        info: The content of run.json.
    """
    return dict((info.get("config") or {}).get("rules") or {})


def effects(frame: pd.DataFrame, order: Sequence[str]) -> list[dict[str, Any]]:
    """Return norms before and after and the changed fraction of every intervention, by location and steps."""
    found = [(series, series.of(frame)) for series in series_in(frame)]
    sizes = [len(EFFECTS) * len(rows[["layer", "path"]].drop_duplicates()) for _, rows in found]
    most = int(np.clip(EFFECTS_ROOM // max(1, sum(sizes)), FEWEST, MOST))
    return [_effect(series, rows, order, most) for series, rows in found if len(rows)]


def _effect(series: RecordedSeries, rows: pd.DataFrame, order: Sequence[str], most: int) -> dict[str, Any]:
    tables = matrices(rows, EFFECTS, order, most)
    axes = tables["norm_before"]
    values = {name: rounded(table.values) for name, table in tables.items()}
    return {**about(series), "locations": axes.locations, **_steps(axes), **values}
