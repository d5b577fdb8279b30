"""Comparison of a metric or a statistic of several runs, and the importance of the overrides of a sweep."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Unpack

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from ..analysis.config_key_effects import importance_of, student
from ..analysis.finite import finite_only
from ..analysis.load import Run
from ..analysis.plot_data import (
    check_choice,
    forward_order,
    matrices,
    row_locations,
    select_location,
    select_series,
    statistics_in,
)
from ..analysis.run_history import METRICS
from ..analysis.run_tables import IN_MEMORY, RunTables
from ..config.schedule import STEP_PHASES
from ..errors import InstrumentError
from ..storage.run_files import RunFiles
from ..tables.schemas import CUSTOM, TABLES
from ..tables.statistics import STATISTICS, statistic_of
from . import axes_and_scales as draw
from .look import Look, axis_name, current
from .plot_function import REQUIRED_COLUMNS, check_columns, check_type, plot, series_with

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 5.5, 3.6  # size of a chart, in inches
LONG = 60  # maximum length of a label, in characters
LINE = 0.17  # height of a legend entry, in inches
SEED = "seed"
DASHES = ("-", "--", ":", "-.")
BAND = {"alpha": 0.2, "linewidth": 0.0}
RATES = ("lr", "learning_rate")  # names of overrides whose axis is logarithmic
FEW_VALUES = 8  # maximum number of values that all get a tick


class Curves(NamedTuple):
    """One line per run, with the title of the chart and the label of the value axis."""

    title: str
    axis: str
    values: dict[str, pd.Series]  # indexed by step or location; NaN if a value is not finite


@plot()
def compare(
    runs: Run | Sequence[Run] | pd.DataFrame,
    y: str = "loss",
    x: str | None = None,
    *,
    layer: str | None = None,
    hook: str | None = None,
    kind: str | None = None,
    role: str | None = None,
    phase: str | None = None,
    **look: Unpack[Look],
) -> Figure:
    """Compare a metric or a statistic of several runs.

    The horizontal axis depends on the arguments:

    - A metric, or a statistic with `layer`, is plotted over the steps.
    - A statistic without `layer` is plotted over the layers, at the last recorded step of each run.
    - With `x`, the last recorded value is plotted over an override: one point per run, and a line through the means of
      the runs that differ only in their seed, with error bars: the 95% confidence intervals of the means. The axis is
      logarithmic for learning rates and other values that are spaced by factors.

    With `interval`, also the lines over steps and layers are means of the runs that differ only in their seed, with the
    confidence intervals as bands; it is the default for three seeds or more. The intervals are those of Student's t
    distribution with n - 1 degrees of freedom for n runs; runs with a value that is not finite do not count.

    Args:
        runs: A `Run` that contains several runs, a list of runs, or rows of the metrics or stats table of several runs.
        y: A metric such as `loss` or `accuracy`, also a custom one, or a statistic such as `l2`.
        x: An override that differs between the runs, such as `hooks.tame.norm`.
        layer: The layer or parameter, for a statistic.
        hook, kind, role: Select the recorded series; see `heatmap`.
        phase: Phase of the rows. Default: `eval` if `x` is given and `y` is a metric of evaluations, otherwise that of
            steps: `train`, or `forward` for runs that do not train.
        look: Width, labels, scale, interval and axes of the figure; see `instrument.plot.Look`.

    Raises:
        InstrumentError: No data matches the arguments or more than one series matches them.
    """
    several, table, frame, overrides = _opened(runs, y)
    at = x if x is None or x in overrides else f"override.{x}"  # if the table has a column of the same name
    if x is not None and at not in overrides:
        check_choice(x, [str(name) for name in overrides], "x", "the runs do not differ in this override")
    wanted = {"hook": hook, "kind": kind, "role": role, "phase": phase}
    if table == "metrics":
        rows = _metric(several, frame, y, phase or _usual_phase(frame, y, x))
    elif layer is not None:
        fitting = pd.concat([series.of(frame) for series in series_with(frame, y)])
        series, location, found = select_location(fitting, layer, **wanted)
        merged = finite_only(found).groupby(["run", "step"], sort=False)[y].agg(statistic_of(y).merged)
        values = {str(run): part.droplevel("run").sort_index() for run, part in merged.groupby("run", sort=False)}
        rows = Curves(f"{y} of {location} ({series.label})", axis_name(y), values)
    elif x is None:
        return _draw_over_locations(*_over_locations(frame, y, forward_order(several), wanted), overrides)
    else:
        raise InstrumentError(f"plotting {y} over {x} requires layer=")
    return _draw_over_steps(rows, overrides) if at is None else _draw_over_override(rows, at, overrides)


def final_values(
    runs: Run | Sequence[Run] | pd.DataFrame, metric: str, phase: str | None = None
) -> tuple[pd.Series, pd.DataFrame, str]:
    """Return the last recorded value of a metric of each run, float64 [runs], with the differing overrides and a title."""
    several, _, frame, overrides = _opened(runs, metric, are_metrics=True)
    curves = _metric(several, frame, metric, phase or _usual_phase(frame, metric, metric))
    values = pd.Series({run: float(line.iloc[-1]) for run, line in curves.values.items()}, dtype=np.float64)
    return values, overrides.drop(columns=metric, errors="ignore").reindex(values.index), curves.title


def _opened(
    runs: Run | Sequence[Run] | pd.DataFrame, y: str, *, are_metrics: bool = False
) -> tuple[Run | pd.DataFrame, str, pd.DataFrame, pd.DataFrame]:
    """Return the runs together, the table that has a metric or a statistic, its rows, and the overrides that differ."""
    several = runs if isinstance(runs, pd.DataFrame) else combine_runs(runs)
    if not isinstance(several, pd.DataFrame):
        metrics, statistics = [*METRICS, *several.custom_metrics], [*STATISTICS, *several.custom_statistics]
    elif "layer" in several:
        metrics, statistics = [*METRICS], [*STATISTICS, *statistics_in(several)]
    else:
        metrics, statistics = [*METRICS, *statistics_in(several)], [*STATISTICS]
    if are_metrics:
        check_choice(y, metrics, "metric", "unknown metric")
    check_choice(y, [*metrics, *statistics], "y", "unknown metric or statistic")
    table = "metrics" if y in metrics else "stats"
    frame: pd.DataFrame = several if isinstance(several, pd.DataFrame) else getattr(several, table)
    check_columns(frame, table, ("run", "step", "phase") if table == "metrics" else ("run", *REQUIRED_COLUMNS))
    own = () if isinstance(several, pd.DataFrame) else several.custom_columns(table)
    return several, table, frame, overrides_of(frame.drop(columns=[*own]), table)


def _usual_phase(metrics: pd.DataFrame, name: str, x: str | None) -> str:
    phases = ["eval", *STEP_PHASES] if x else STEP_PHASES
    return next((phase for phase in phases if _has(metrics, name, phase)), "train")


def _has(metrics: pd.DataFrame, name: str, phase: str) -> bool:
    return name in metrics and bool(metrics.loc[metrics["phase"] == phase, name].notna().any())


def _metric(several: Run | pd.DataFrame, frame: pd.DataFrame, name: str, phase: str) -> Curves:
    check_choice(phase, list(frame["phase"]), "phase", "no metrics were recorded in this phase")
    rows = frame[frame["phase"] == phase]
    there = [one for one in dict.fromkeys((*METRICS, name)) if _has(frame, one, phase)]
    check_choice(name, there, "y", f"no run has a value of this metric in phase {phase}")
    values = {str(run): part.groupby("step")[name].mean() for run, part in rows.groupby("run", sort=False)}
    if isinstance(several, Run):  # a DataFrame does not distinguish steps without the metric from a NaN
        parts = zip(several.names, map(several.single, range(len(several.names))), strict=True)
        recorded = {run: _recorded(part, name, phase) for run, part in parts if run in values}
        values = {run: line for run, line in recorded.items() if len(line)}
    return Curves(f"{name} ({phase})", METRICS.get(name, name), values)


def _recorded(run: RunTables, name: str, phase: str) -> pd.Series:
    """Return a metric over the steps of a phase at which it was recorded."""
    if name not in (*METRICS, *run.custom_metrics):
        return pd.Series(dtype=np.float64)
    cells = ds.field(name)
    if name not in METRICS:
        cells = pc.map_lookup(ds.field(CUSTOM.name), query_key=pa.scalar(name), occurrence="first")
    rows = run.read("metrics", ["step", name], cells.is_valid() & (ds.field("phase") == phase))
    return rows.groupby("step")[name].mean()


def _over_locations(
    frame: pd.DataFrame, name: str, order: Sequence[str], wanted: dict[str, str | None]
) -> tuple[Curves, list[str]]:
    """Return a statistic of each run by location at its last recorded step, and all locations in forward order."""
    series = select_series(series_with(frame, name), **wanted)
    rows = series.of(frame)
    locations = list(row_locations(rows, order).cat.categories)
    values, steps = {}, set()
    for run, part in rows.groupby("run", sort=False):
        table = matrices(part[part["step"] == part["step"].max()], [name], order, 1)[name]
        values[str(run)] = pd.Series(table.values[:, 0], index=table.locations)
        steps.add(int(table.last[0]))
    when = f"{min(steps):,}" if len(steps) == 1 else f"{min(steps):,} to {max(steps):,}"
    return Curves(f"{name} of {series.label}, last recorded step ({when})", axis_name(name), values), locations


def _draw_over_steps(curves: Curves, overrides: pd.DataFrame) -> Figure:
    lines = _lines(curves, overrides)
    charts = _chart([line.label for line in lines], draw.height_or(HEIGHT), 0.0)
    axes = charts[0, 0]
    for line in lines:
        draw.draw_line(axes, line.values, line.label, line.colour, line.dashes)
        if line.width is not None:
            low, high = line.values - line.width, line.values + line.width
            axes.fill_between(line.values.index, low, high, color=line.colour, **BAND)
    draw.scale(axes, "y", np.concatenate([line.values.to_numpy(np.float64) for line in lines]))
    return draw.finished(charts, curves.title, at_side=True, xlabel=_with_note("step", lines), ylabel=curves.axis)


def _draw_over_locations(curves: Curves, locations: list[str], overrides: pd.DataFrame) -> Figure:
    """Draw one line per run, or per group of runs that differ in the seed, over the locations, from top to bottom."""
    placed = {run: line.reindex(locations).astype(np.float64) for run, line in curves.values.items()}
    lines = _lines(curves._replace(values=placed), overrides)
    charts = _chart([line.label for line in lines], draw.height_of(len(locations)), draw.width_of(locations))
    axes, rows = charts[0, 0], range(len(locations))
    for line in lines:
        axes.plot(line.values, rows, color=line.colour, linestyle=line.dashes, marker=".", label=line.label)
        if line.width is not None:
            axes.fill_betweenx(rows, line.values - line.width, line.values + line.width, color=line.colour, **BAND)
    draw.scale(axes, "x", np.concatenate([line.values.to_numpy(np.float64) for line in lines]))
    draw.label_locations(axes, locations)
    xlabel = _with_note(curves.axis, lines)
    return draw.finished(charts, curves.title, at_side=True, xlabel=xlabel, ylabel="in forward order")


class Line(NamedTuple):
    """A line of the chart: of a run, or the means of runs with half the widths of their intervals."""

    label: str
    colour: str
    dashes: str
    values: pd.Series
    width: pd.Series | None = None


def _lines(curves: Curves, overrides: pd.DataFrame) -> list[Line]:
    """Return one line per run, or the means of runs that differ only in their seed; see `compare`."""
    groups: dict[str, list[str]] = {}
    for run, label in _labels_without_seed(overrides).items():
        if run in curves.values:
            groups.setdefault(label, []).append(run)
    are_seeds = SEED in overrides and not overrides.reset_index(drop=True).map(str).duplicated().any()
    if are_seeds and current().has_intervals(max(map(len, groups.values()), default=0)):
        means = (_mean_of([curves.values[run] for run in runs]) for runs in groups.values())
        named = zip(groups, means, strict=True)
        names = [(draw.plain(label or "mean", LONG), mean) for label, mean in named]
        return [Line(name, draw.colour_of(i), "-", *mean) for i, (name, mean) in enumerate(names)]
    labels = labels_of(overrides)
    styles = _styles(overrides).items()
    return [
        Line(draw.plain(labels[run], LONG), *style, curves.values[run]) for run, style in styles if run in curves.values
    ]


def _mean_of(values: list[pd.Series]) -> tuple[pd.Series, pd.Series]:
    """Return the mean of the finite values at each index, and half the width of its interval; NaN for a single value."""
    is_equal = all(each.index.equals(values[0].index) for each in values)  # locations stay in forward order
    table = pd.concat(values, axis=1, sort=not is_equal).astype(np.float64).replace([np.inf, -np.inf], np.nan)
    mean, counts = table.mean(axis=1), table.count(axis=1)
    squares = table.sub(mean, axis=0).pow(2).sum(axis=1)
    width, _ = student(mean.to_numpy(), squares.to_numpy(), counts.to_numpy(), current().interval)
    return mean, pd.Series(width, mean.index)


def _with_note(axis: str, lines: Sequence[Line]) -> str:
    has_intervals = any(line.width is not None for line in lines)
    return f"{axis}\nmeans over seeds with {100 * current().interval:g}% intervals" if has_intervals else axis


def _draw_over_override(curves: Curves, x: str, overrides: pd.DataFrame) -> Figure:
    """Draw the last value of each run as a point, and a line through the means of runs with different seeds."""
    finals = {run: float(line.iloc[-1]) for run, line in curves.values.items()}
    alike = _labels_without_seed(overrides.drop(columns=x))
    labels = {label: label or "mean" for label in alike.values()}
    at, names = _positions(overrides[x])
    charts = _chart(list(labels.values()), draw.height_or(HEIGHT), 0.0)
    axes, has_intervals = charts[0, 0], False
    for i, (group, label) in enumerate(labels.items()):
        runs = [run for run in finals if alike[run] == group]
        points = pd.Series([finals[run] for run in runs], index=[at[run] for run in runs], dtype=float)
        cells = [pd.Series({place: value}) for place, value in points[np.isfinite(points)].items()]
        axes.plot(points.index, points.to_numpy(), "o", color=draw.colour_of(i), markersize=4, alpha=0.6)
        if not cells:
            continue
        means, widths = _mean_of(cells)
        axes.plot(
            means.index, means.to_numpy(), "-", color=draw.colour_of(i), label=draw.plain(label, LONG), marker="_"
        )
        if current().interval and widths.notna().any():
            has_intervals = True
            axes.errorbar(means.index, means, widths.fillna(0.0), fmt="none", ecolor=draw.colour_of(i))
    lost = [at[run] for run, value in finals.items() if not np.isfinite(value)]
    if lost:
        top = axes.get_xaxis_transform()
        axes.plot(lost, [0.97] * len(lost), "x", color="black", transform=top, label="not finite at the end")
    draw.scale(axes, "y", np.array(list(finals.values())))
    places = np.unique(list(at.values()))
    draw.scale(axes, "x", places, is_log=not names and is_rate(x, places.tolist()))
    if names or len(places) <= FEW_VALUES:
        axes.set_xticks(places, [draw.plain(name, 16) for name in names or map(value_text, places)])
        axes.minorticks_off()
    bars = f"; bars: {100 * current().interval:g}% intervals" if has_intervals else ""
    over = f"{draw.plain(x)}\npoints: runs; lines: means over runs{bars}"
    return draw.finished(charts, f"{curves.title}, last recorded", at_side=True, xlabel=over, ylabel=curves.axis)


def _positions(values: pd.Series) -> tuple[dict[str, float], list[str]]:
    """Return the position of each run on the axis of an override, and tick labels if the values are not numbers."""
    cells = {str(run): value for run, value in values.items()}
    if all(is_number(cell) for cell in cells.values()):
        return {run: float(cell) for run, cell in cells.items()}, []
    words = {run: "not set" if is_missing(cell) else value_text(cell) for run, cell in cells.items()}
    names = list(dict.fromkeys(words.values()))
    return {run: float(names.index(word)) for run, word in words.items()}, names


def is_number(cell: object) -> bool:
    """Return whether a value is a finite number, and not a truth value."""
    return isinstance(cell, int | float) and not isinstance(cell, bool) and math.isfinite(cell)


def is_rate(name: str, cells: Sequence[object]) -> bool:
    """Return whether values are compared by their ratios: a learning rate, a wide range, or spacing by factors."""
    if not all(is_number(cell) and cell > 0 for cell in cells):  # type: ignore[operator]
        return False
    values = np.unique(np.asarray(cells, np.float64))
    if len(values) < 2:
        return False
    is_named = name.rsplit(".", 1)[-1].strip("_") in RATES
    steps, factors = np.diff(values), np.diff(np.log(values))
    is_spaced = np.std(factors) / np.mean(factors) < np.std(steps) / np.mean(steps) and values[-1] >= 8 * values[0]
    return is_named or draw.needs_log_scale(values) or bool(is_spaced)


def _labels_without_seed(overrides: pd.DataFrame) -> dict[str, str]:
    return {str(run): overrides_text(row) for run, row in overrides.drop(columns=SEED, errors="ignore").iterrows()}


def _styles(overrides: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Return a color and a line style for each run; runs that differ only in their seed have the same color."""
    alike = _labels_without_seed(overrides)
    distinct = len(set(alike.values())) > 1
    colours = {key: draw.colour_of(i) for i, key in enumerate(dict.fromkeys(alike.values()) if distinct else alike)}
    seen: Counter[str] = Counter()
    looks = {}
    for run, label in alike.items():
        key = label if distinct else run
        looks[run] = (colours[key], DASHES[seen[key] % len(DASHES)])
        seen[key] += 1
    return looks


def _chart(labels: Sequence[str], height: float, left: float) -> np.ndarray:
    """Create a figure with room for labels at the left and a legend at the right."""
    letters = max((min(len(label), LONG) for label in labels), default=0)
    room = 0.0 if current().width else LINE * len(labels)
    charts = draw.new_charts(left + WIDTH + 1.0 + draw.LETTER * letters, max(height, room) + 1.0)
    charts[0, 0].grid(True)
    return charts


def combine_runs(runs: Run | Sequence[Run]) -> Run:
    """Combine several loaded runs into one `Run`, as if a common parent folder had been loaded."""
    if isinstance(runs, Run) and len(runs.folders) > 1:
        return runs
    found: dict[Path, RunFiles] = {}
    for run in runs if isinstance(runs, Iterable) else [runs]:
        check_type(run)
        for folder, files in zip(run.folders, run.files, strict=True):
            if files not in found.values():
                number = f" {len(found) + 1}" if folder == IN_MEMORY else ""  # all probes in memory have this name
                found.setdefault(folder.resolve().with_name(f"{folder.name}{number}"), files)
    if not found:
        raise InstrumentError("runs is empty")
    return Run(Path(os.path.commonpath([folder.parent for folder in found])), [*found], [*found.values()])


def overrides_of(frame: pd.DataFrame, table: str) -> pd.DataFrame:
    """Return the overrides of a table that differ between its runs: one row per run, one column per override."""
    own = [str(name) for name in frame if name != "run" and name not in TABLES[table].names]
    # A custom statistic or metric has several values in a run.
    floats = [name for name in own if pd.api.types.is_float_dtype(frame[name])]
    varying = {name for name in floats if (frame.groupby("run")[name].nunique(dropna=False) != 1).any()}
    own = [name for name in own if name not in varying]
    first = frame.drop_duplicates("run").set_index("run")[own]
    return first[[name for name in own if first[name].map(str).nunique() > 1]]


def labels_of(overrides: pd.DataFrame) -> dict[str, str]:
    """Return the overrides of each run as a label; with the folder of the run if it is too long or not unique."""
    labels = {run: overrides_text(row) for run, row in overrides.iterrows()}
    counts = Counter(labels.values())
    unique = {label for label in counts if label and counts[label] == 1 and len(label) <= LONG}
    return {str(run): label if label in unique else f"{run} {label}".strip() for run, label in labels.items()}


def overrides_text(row: pd.Series) -> str:
    """Return the overrides of a run as one line, such as `optimizer.lr=0.1 seed=1`; missing overrides are omitted."""
    return " ".join(f"{name}={value_text(value)}" for name, value in row.items() if not is_missing(value))


def value_text(value: object) -> str:
    """Return a value as it is written on the command line."""
    # Missing values turn a column of integers into floats, so 1.0 becomes `1`.
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def is_missing(value: object) -> bool:
    """Return whether the value marks an override that a run does not have."""
    return value is pd.NA or (isinstance(value, float) and math.isnan(value))


BARS_WIDTH = 3.4  # width of the chart of importance without labels, in inches


@plot()
def importance(
    runs: Run | Sequence[Run] | pd.DataFrame, metric: str = "loss", *, phase: str | None = None, **look: Unpack[Look]
) -> Figure:
    """Plot the fraction of the variance of the last value of a metric that each override of a sweep explains.

    The bars are the main effects of the overrides, with the rest as interactions; the seed is an override too. The error
    bars are 95% intervals over the bootstrap samples of a regression forest; see `instrument.analysis.config_key_effects.importance_of`.

    Args:
        runs: A `Run` that contains several runs, a list of runs, or rows of the metrics table of several runs.
        metric: A metric such as `loss` or `accuracy`, also a custom one.
        phase: Phase of the rows. Default: `eval` if the metric was recorded there, otherwise that of steps.
        look: Width, labels, scale, interval and axes of the figure; see `instrument.plot.Look`.

    Raises:
        InstrumentError: The metric is unknown, fewer than 4 runs have a finite value, all values are equal, or the runs
            do not differ in any override.
    """
    values, factors, title = final_values(runs, metric, phase)
    table = importance_of(factors, values, interval=current().interval)
    names = [str(name) for name in table.index]
    charts = draw.new_charts(BARS_WIDTH + draw.width_of(names), max(1.0, draw.height_of(0) * len(names) / 6) + 1.0)
    axes = charts[0, 0]
    rows = range(len(names))
    shares = table["importance"].to_numpy()
    axes.barh(rows, shares, height=0.7, color=draw.colour_of(0))
    if current().interval:
        ends = np.abs(table[["low", "high"]].to_numpy().T - shares)
        axes.errorbar(shares, rows, xerr=ends, fmt="none", ecolor="black", capsize=2)
    draw.scale(axes, "x", shares, is_log=current().scale == "log")
    if current().scale != "log":
        axes.set_xlim(0.0, 1.0)
    draw.label_locations(axes, names)
    axes.grid(axis="x")
    bars = f"; bars: {100 * current().interval:g}% intervals" if current().interval else ""
    label = f"fraction of the variance\n{np.isfinite(values).sum()} runs{bars}"
    return draw.finished(charts, f"importance for {title}", xlabel=label)
