"""What the charts of one run are drawn from: plain numbers, grouped where there are more than a page has room for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from ..analysis.choice import spread
from ..analysis.load import Run
from ..analysis.series import (
    Groups,
    Matrix,
    Series,
    forward_order,
    groups_of,
    matrices,
    place_of,
    places_in,
    series_in,
    statistics_in,
)
from .numbers import rounded
from .pictures import maps

STATISTICS_ROOM = 500_000  # numbers in all heat maps together
FEWEST, MOST = 10, 1_000  # groups of steps in one of them
CURVE_POINTS = 1_000
HISTOGRAM_ROOM, HISTOGRAM_STEPS = 120_000, 40
EFFECTS_ROOM = 60_000
EFFECTS = ("norm_before", "norm_after", "changed_fraction")
MIDDLE = 0.5
METRICS = ("loss", "accuracy", "grad_norm", "lr", "samples_per_second", "seconds")


def charts(run: Run) -> dict[str, Any]:
    """All that the charts of one run's page show."""
    order = forward_order(run)
    recorded = run.distributions
    return {
        "series": heat_maps(run.stats, order) + heat_maps(_only_spread(run.stats, recorded), order),
        "distributions": distributions(recorded),
        "metrics": curves(run),
        "acted": acted(run.effects),
        "alerts": alerts(run.events),
        "effects": effects(run.effects, order),
        "maps": maps(run, order),
    }


def heat_maps(stats: pd.DataFrame, order: Sequence[str]) -> list[dict[str, Any]]:
    """Every statistic of every series by place and group of steps."""
    found = [(series, series.of(stats)) for series in series_in(stats)]
    sizes = [rows[["layer", "path"]].drop_duplicates().shape[0] * len(_shown(rows)) for _, rows in found]
    most = int(np.clip(STATISTICS_ROOM // max(1, sum(sizes)), FEWEST, MOST))
    return [_heat_map(series, rows, order, most) for series, rows in found if _shown(rows)]


def _only_spread(stats: pd.DataFrame, recorded: pd.DataFrame) -> pd.DataFrame:
    """Distributions of what has no statistics, as a table of some: what a histogram or quantiles tell of them."""
    where = ["kind", "role", "phase"]
    measured = pd.MultiIndex.from_frame(stats[where].drop_duplicates())
    alone = recorded[~pd.MultiIndex.from_frame(recorded[where]).isin(measured)]
    medians = [_median(*cells) for cells in zip(alone["levels"], alone["quantiles"], strict=True)]
    return alone.assign(min=alone["low"], max=alone["high"], median=pd.Series(medians, alone.index, dtype=np.float64))


def _median(levels: Sequence[float] | None, quantiles: Sequence[float] | None) -> float | None:
    if levels is None or quantiles is None or MIDDLE not in levels:
        return None
    return quantiles[list(levels).index(MIDDLE)]


def _heat_map(series: Series, rows: pd.DataFrame, order: Sequence[str], most: int) -> dict[str, Any]:
    statistics = _shown(rows)
    tables = matrices(rows, statistics, order, most)
    axes = tables[statistics[0]]
    return {
        **_about(series),
        **_steps(axes),
        "places": axes.places,
        "several": bool(rows.duplicated(["layer", "path", "step"]).any()),
        "types": dict(zip(places_in(rows, order).astype(str), rows["module_type"], strict=True)),
        "statistics": {name: rounded(table.values) for name, table in tables.items()},
    }


def _shown(rows: pd.DataFrame) -> list[str]:
    median = ["median"] if "median" in rows and rows["median"].notna().any() else []
    return statistics_in(rows) + median


def _about(series: Series) -> dict[str, Any]:
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
    """Quantiles and histograms of every place, of some of its steps; each a row as it was recorded."""
    found = []
    kept = frame[~frame["recompute"].astype(bool)]
    places = kept.groupby(["hook", "kind", "role", "phase", "layer", "path"], sort=False)
    room = max(1, HISTOGRAM_ROOM // max(1, len(places)))
    for at, rows in places:
        hook, kind, role, phase, layer, path = map(str, at)
        numbers = rows.iloc[0][["counts", "quantiles"]].map(lambda cell: 0 if cell is None else len(cell)).sum()
        first = rows.drop_duplicates("step")  # the first call of each step: histograms of several are no histogram
        some = first.iloc[spread(len(first), min(HISTOGRAM_STEPS, max(2, room // max(1, int(numbers)))))]
        found.append(
            {
                **_about(Series(hook, kind, role, phase)),
                "place": place_of(layer, path, kind),
                "of": len(first),
                "several": bool(rows["step"].duplicated().any()),
                "steps": some["step"].tolist(),
                "levels": rounded(_listed(some["levels"])),
                "quantiles": rounded(_listed(some["quantiles"])),
                "low": rounded(some["low"].to_numpy(np.float64)),
                "high": rounded(some["high"].to_numpy(np.float64)),
                "counts": _listed(some["counts"]),
            }
        )
    return found


def _listed(cells: pd.Series) -> list[list[float] | None]:
    return [None if cell is None else np.asarray(cell).tolist() for cell in cells]


def curves(run: Run, most: int = CURVE_POINTS) -> dict[str, Any]:
    """Each phase's metrics over steps, a group's number being the mean of the finite ones.

    `bad` has, for each metric, the steps at which it is there and is no finite number.
    """
    batches = list(run.scan("metrics", ["step", "phase", *METRICS]))
    if not batches:
        return {}
    table = pa.Table.from_batches(batches)
    there = {name: table[name].is_valid().to_numpy() for name in METRICS}  # pandas does not tell NaN from null
    metrics: pd.DataFrame = table.to_pandas()
    metrics["phase"] = metrics["phase"].astype(str)
    finite = np.isfinite(metrics[list(METRICS)].to_numpy(np.float64))
    bad = pd.DataFrame({name: there[name] & ~finite[:, i] for i, name in enumerate(METRICS)})
    known = metrics.assign(**metrics[list(METRICS)].where(finite))
    found = {}
    for phase, rows in known.groupby("phase", sort=False):
        groups = groups_of(rows["step"], most)
        means = rows.groupby(rows["step"].map(groups.number))[list(METRICS)].mean()
        lost = {name: rows.loc[bad.loc[rows.index, name], "step"].drop_duplicates().tolist() for name in METRICS}
        found[str(phase)] = {
            **_steps(groups),
            **{name: rounded(means[name].to_numpy()) for name in METRICS if means[name].notna().any() or lost[name]},
            "bad": {name: [steps[i] for i in spread(len(steps), most)] for name, steps in lost.items() if steps},
        }
    return found


def _steps(axis: Groups | Matrix) -> dict[str, Any]:
    return {"first": axis.first.tolist(), "last": axis.last.tolist()}


def acted(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The steps at which each intervention acted, as stretches of neighbours."""
    found = []
    for hook, rows in frame.groupby("hook", sort=False):
        groups = groups_of(rows["step"], CURVE_POINTS)
        stretches = zip(groups.first.tolist(), groups.last.tolist(), strict=True)
        found.append({"hook": hook, "steps": _joined(stretches), "count": len(groups.number)})
    return found


def _joined(stretches: Iterable[tuple[int, int]]) -> list[list[int]]:
    """Stretches that touch, as one."""
    whole: list[list[int]] = []
    for begin, end in stretches:
        if whole and begin <= whole[-1][1] + 1:
            whole[-1][1] = end
        else:
            whole.append([begin, end])
    return whole


def alerts(events: pd.DataFrame) -> list[dict[str, Any]]:
    """Warnings and errors that belong to a step."""
    shown = events[events["severity"].isin(["warning", "error"]) & events["step"].notna()]
    return [
        {"step": int(row["step"]), "rule": row["rule"], "message": row["message"], "severity": row["severity"]}
        for row in shown.to_dict("records")
    ]


def effects(frame: pd.DataFrame, order: Sequence[str]) -> list[dict[str, Any]]:
    """Norms before and after, and the fraction changed, of every intervention by place and group of steps."""
    found = [(series, series.of(frame)) for series in series_in(frame)]
    sizes = [len(EFFECTS) * len(rows[["layer", "path"]].drop_duplicates()) for _, rows in found]
    most = int(np.clip(EFFECTS_ROOM // max(1, sum(sizes)), FEWEST, MOST))
    return [_effect(series, rows, order, most) for series, rows in found if len(rows)]


def _effect(series: Series, rows: pd.DataFrame, order: Sequence[str], most: int) -> dict[str, Any]:
    tables = matrices(rows, EFFECTS, order, most)
    axes = tables["norm_before"]
    values = {name: rounded(table.values) for name, table in tables.items()}
    return {**_about(series), "places": axes.places, **_steps(axes), **values}
