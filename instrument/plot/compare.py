"""Comparison of a metric or a statistic of several runs."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pandas as pd

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
from ..config.schedule import STEP_PHASES
from ..errors import InstrumentError
from ..tables.schemas import MOMENT, TABLES
from ..tables.statistics import STATISTICS, statistic_of
from .axes_and_scales import (
    LETTER,
    SMALL,
    add_legend,
    draw_line,
    height_of,
    label_locations,
    new_figure,
    plain,
    scale,
    width_of,
)
from .source import REQUIRED_COLUMNS, check_columns, series_with
from .style import CATEGORIES, axis_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 5.5, 3.6  # size of a chart, in inches
LONG = 60  # maximum length of a label, in characters
LINE = 0.17  # height of a legend entry, in inches
SEED = "seed"
DASHES = ("-", "--", ":", "-.")
FEW_VALUES = 8  # maximum number of values that all get a tick
_FLOATS = [c for c in TABLES["metrics"].columns if c not in MOMENT and c.name != "skipped"]
METRICS = {c.name: f"{c.name} [{c.unit}]" if c.unit in ("fraction", "s", "1/s") else c.name for c in _FLOATS}
"""Axis labels of the numeric metrics, by name of the metric."""


class Curves(NamedTuple):
    """One line per run, with the title of the chart and the label of the value axis."""

    title: str
    axis: str
    values: dict[str, pd.Series]  # indexed by step or location; NaN if a value is not finite


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
) -> Figure:
    """Compare a metric or a statistic of several runs.

    The horizontal axis depends on the arguments:

    - A metric, or a statistic with `layer`, is plotted over the steps.
    - A statistic without `layer` is plotted over the layers, at the last recorded step of each run.
    - With `x`, the last recorded value is plotted over an override: one point per run, and a line through the means of
      the runs that differ only in their seed.

    Args:
        runs: A `Run` that contains several runs, a list of runs, or rows of the metrics or stats table of several runs.
        y: A metric such as `loss` or `accuracy`, also a custom one, or a statistic such as `l2`.
        x: An override that differs between the runs, such as `hooks.tame.norm`.
        layer: The layer or parameter, for a statistic.
        hook: Name of the hook that recorded the statistic; required if several hooks did.
        kind: Kind of the hook, such as `forward`.
        role: Role of the tensor, such as `output`.
        phase: Phase of the rows. Default: `eval` if `x` is given and `y` is a metric of evaluations, otherwise that of
            steps: `train`, or `forward` for runs that do not train.

    Returns:
        The matplotlib figure.

    Raises:
        InstrumentError: No data matches the arguments, more than one series matches them, or matplotlib is not
            installed.
    """
    several = runs if isinstance(runs, pd.DataFrame) else combine_runs(runs)
    metrics, statistics = _choices(several)
    check_choice(y, [*metrics, *statistics], "y", "unknown metric or statistic")
    table = "metrics" if y in metrics else "stats"
    frame = _frame_of(several, table)
    custom = () if isinstance(several, pd.DataFrame) else several.custom_columns(table)
    overrides = overrides_of(frame.drop(columns=[*custom]), table)
    at = _override(x, overrides)
    wanted = {"hook": hook, "kind": kind, "role": role, "phase": phase}
    if table == "metrics":
        rows = _metric(frame, y, phase or _usual_phase(frame, y, x))
    elif layer is not None:
        rows = _at_layer(frame, y, layer, wanted)
    elif x is None:
        return _draw_over_locations(*_over_locations(frame, y, forward_order(several), wanted), overrides)
    else:
        raise InstrumentError(f"plotting {y} over {x} requires layer=")
    return _draw_over_steps(rows, overrides) if at is None else _draw_over_override(rows, at, overrides)


def _choices(several: Run | pd.DataFrame) -> tuple[list[str], list[str]]:
    """Return the names of the metrics and of the statistics, with custom ones."""
    if not isinstance(several, pd.DataFrame):
        return [*METRICS, *several.custom_metrics], [*STATISTICS, *several.custom_statistics]
    custom = statistics_in(several)
    if "layer" in several:
        return [*METRICS], [*STATISTICS, *custom]
    return [*METRICS, *custom], [*STATISTICS]


def _frame_of(several: Run | pd.DataFrame, table: str) -> pd.DataFrame:
    frame: pd.DataFrame = several if isinstance(several, pd.DataFrame) else getattr(several, table)
    check_columns(frame, table, ("run", "step", "phase") if table == "metrics" else ("run", *REQUIRED_COLUMNS))
    return frame


def _override(x: str | None, overrides: pd.DataFrame) -> str | None:
    """Return the column of an override; it is `override.<name>` if the table has a column of the same name."""
    if x is None:
        return None
    column = x if x in overrides else f"override.{x}"
    if column not in overrides:
        check_choice(x, [str(name) for name in overrides], "x", "the runs do not differ in this override")
    return column


def _usual_phase(metrics: pd.DataFrame, name: str, x: str | None) -> str:
    phases = ["eval", *STEP_PHASES] if x else STEP_PHASES
    return next((phase for phase in phases if _has(metrics, name, phase)), "train")


def _has(metrics: pd.DataFrame, name: str, phase: str) -> bool:
    return name in metrics and bool(metrics.loc[metrics["phase"] == phase, name].notna().any())


def _metric(frame: pd.DataFrame, name: str, phase: str) -> Curves:
    """Return a metric of each run over the steps, as the mean over ranks."""
    check_choice(phase, list(frame["phase"]), "phase", "no metrics were recorded in this phase")
    rows = frame[frame["phase"] == phase]
    there = [one for one in dict.fromkeys((*METRICS, name)) if _has(frame, one, phase)]
    check_choice(name, there, "y", f"no run has a value of this metric in phase {phase}")
    values = {str(run): part.groupby("step")[name].mean() for run, part in rows.groupby("run", sort=False)}
    return Curves(f"{name} ({phase})", METRICS.get(name, name), values)


def _at_layer(frame: pd.DataFrame, name: str, layer: str, wanted: dict[str, str | None]) -> Curves:
    """Return a statistic of one location of each run over the steps; several calls in a step are merged."""
    fitting = pd.concat([series.of(frame) for series in series_with(frame, name)])
    series, location, rows = select_location(fitting, layer, **wanted)
    merged = finite_only(rows).groupby(["run", "step"], sort=False)[name].agg(statistic_of(name).merged)
    values = {str(run): part.droplevel("run").sort_index() for run, part in merged.groupby("run", sort=False)}
    return Curves(f"{name} of {location} ({series.label})", axis_name(name), values)


def _over_locations(
    frame: pd.DataFrame, name: str, order: Sequence[str], wanted: dict[str, str | None]
) -> tuple[Curves, list[str]]:
    """Return a statistic of each run by location at its last recorded step, and all locations in forward order."""
    series = select_series(series_with(frame, name), **wanted)
    rows = series.of(frame)
    locations = list(row_locations(rows, order).cat.categories)
    values, steps = {}, set()
    for run, part in rows.groupby("run", sort=False):
        last = part[part["step"] == part["step"].max()]
        table = matrices(last, [name], order, 1)[name]
        values[str(run)] = pd.Series(table.values[:, 0], index=table.locations)
        steps.add(int(table.last[0]))
    when = f"{min(steps):,}" if len(steps) == 1 else f"{min(steps):,} to {max(steps):,}"
    return Curves(f"{name} of {series.label}, last recorded step ({when})", axis_name(name), values), locations


# ------------------------------------------------------------------------------------------------ drawing


def _draw_over_steps(curves: Curves, overrides: pd.DataFrame) -> Figure:
    labels = labels_of(overrides)
    axes = _chart(labels, HEIGHT, 0.0)
    for run, (colour, dashes) in _styles(overrides).items():
        if run in curves.values:
            draw_line(axes, curves.values[run], plain(labels[run], LONG), colour, dashes)
    values = np.concatenate([line.to_numpy(np.float64) for line in curves.values.values()])
    scale(axes, "y", values)
    return _finished(axes, curves.title, "step", curves.axis)


def _draw_over_locations(curves: Curves, locations: list[str], overrides: pd.DataFrame) -> Figure:
    """Draw one line per run over the locations, from top to bottom."""
    labels = labels_of(overrides)
    axes = _chart(labels, height_of(len(locations)), width_of(locations))
    rows = range(len(locations))
    lines = {run: line.reindex(locations).to_numpy(np.float64) for run, line in curves.values.items()}
    for run, (colour, dashes) in _styles(overrides).items():
        if run in lines:
            label = plain(labels[run], LONG)
            axes.plot(lines[run], rows, color=colour, linestyle=dashes, marker=".", linewidth=1.0, label=label)
    values = np.concatenate(list(lines.values()))
    scale(axes, "x", values)
    label_locations(axes, locations)
    return _finished(axes, curves.title, curves.axis, "in forward order")


def _draw_over_override(curves: Curves, x: str, overrides: pd.DataFrame) -> Figure:
    """Draw the last value of each run as a point, and a line through the means of runs with different seeds."""
    finals = {run: float(line.iloc[-1]) for run, line in curves.values.items()}
    alike = _labels_without_seed(overrides.drop(columns=x))
    labels = {label: label or "mean" for label in alike.values()}
    at, names = _positions(overrides[x])
    axes = _chart(labels, HEIGHT, 0.0)
    for (group, label), colour in zip(labels.items(), cycle(CATEGORIES), strict=False):
        runs = [run for run in finals if alike[run] == group]
        points = pd.Series([finals[run] for run in runs], index=[at[run] for run in runs], dtype=float)
        means = points[np.isfinite(points)].groupby(level=0).mean()
        axes.plot(points.index, points.to_numpy(), "o", color=colour, markersize=5, alpha=0.6)
        axes.plot(means.index, means.to_numpy(), "-", color=colour, linewidth=1.5, label=plain(label, LONG), marker="_")
    lost = [at[run] for run, value in finals.items() if not np.isfinite(value)]
    if lost:
        top = axes.get_xaxis_transform()
        axes.plot(lost, [0.97] * len(lost), "x", color="black", transform=top, label="not finite at the end")
    scale(axes, "y", np.array(list(finals.values())))
    _label_values(axes, at, names)
    over = f"{plain(x)}\npoints: runs; lines: means over runs"
    return _finished(axes, f"{curves.title}, last recorded", over, curves.axis)


def _positions(values: pd.Series) -> tuple[dict[str, float], list[str]]:
    """Return the position of each run on the axis of an override, and tick labels if the values are not numbers."""
    cells = {str(run): value for run, value in values.items()}
    if all(_is_number(cell) for cell in cells.values()):
        return {run: float(cell) for run, cell in cells.items()}, []
    words = {run: "not set" if is_missing(cell) else value_text(cell) for run, cell in cells.items()}
    names = list(dict.fromkeys(words.values()))
    return {run: float(names.index(word)) for run, word in words.items()}, names


def _is_number(cell: object) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool) and math.isfinite(cell)


def _label_values(axes: Axes, at: dict[str, float], names: list[str]) -> None:
    """Set up the horizontal axis of an override: logarithmic for a wide range, one tick per value for few values."""
    values = np.unique(list(at.values()))
    scale(axes, "x", values, is_log=False if names else None)
    if names or len(values) <= FEW_VALUES:
        axes.set_xticks(values, [plain(name, 16) for name in names or map(value_text, values)])
        axes.minorticks_off()


def _labels_without_seed(overrides: pd.DataFrame) -> dict[str, str]:
    return {str(run): overrides_text(row) for run, row in overrides.drop(columns=SEED, errors="ignore").iterrows()}


def _styles(overrides: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Return a color and a line style for each run; runs that differ only in their seed have the same color."""
    alike = _labels_without_seed(overrides)
    distinct = len(set(alike.values())) > 1
    colours = dict(zip(dict.fromkeys(alike.values()) if distinct else alike, cycle(CATEGORIES), strict=False))
    seen: Counter[str] = Counter()
    looks = {}
    for run, label in alike.items():
        key = label if distinct else run
        looks[run] = (colours[key], DASHES[seen[key] % len(DASHES)])
        seen[key] += 1
    return looks


def _chart(labels: dict[str, str], height: float, left: float) -> Axes:
    """Create a figure with room for labels at the left and a legend at the right."""
    letters = max((min(len(label), LONG) for label in labels.values()), default=0)
    figure = new_figure(left + WIDTH + 1.0 + LETTER * letters, max(height, LINE * len(labels)) + 1.0)
    return figure.subplots()


def _finished(axes: Axes, title: str, x: str, y: str) -> Figure:
    axes.set_title(plain(title, 80), fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=SMALL)
    figure = axes.get_figure(root=True)
    assert figure is not None
    add_legend(figure, beside=True)
    return figure


# ------------------------------------------------------------------------------------------------ runs and their labels


def combine_runs(runs: Run | Sequence[Run]) -> Run:
    """Combine several loaded runs into one `Run`, as if a common parent folder had been loaded.

    Raises:
        InstrumentError: `runs` is empty.
    """
    if isinstance(runs, Run) and len(runs.folders) > 1:
        return runs
    all_runs = [runs] if isinstance(runs, Run) else runs
    folders = list(dict.fromkeys(folder.resolve() for run in all_runs for folder in run.folders))
    if not folders:
        raise InstrumentError("runs is empty")
    return Run(Path(os.path.commonpath([folder.parent for folder in folders])), folders)


def overrides_of(frame: pd.DataFrame, table: str) -> pd.DataFrame:
    """Return the overrides of a table that differ between its runs: one row per run, one column per override."""
    known = TABLES[table].names
    own = [str(name) for name in frame if name != "run" and name not in known and _is_constant(frame, str(name))]
    first = frame.drop_duplicates("run").set_index("run")[own]
    return first[[name for name in own if first[name].map(str).nunique() > 1]]


def _is_constant(frame: pd.DataFrame, name: str) -> bool:
    """Return whether a column has one value in each run: a custom statistic or metric is not an override."""
    if not pd.api.types.is_float_dtype(frame[name]):
        return True
    return bool((frame.groupby("run")[name].nunique(dropna=False) == 1).all())


def labels_of(overrides: pd.DataFrame) -> dict[str, str]:
    """Return the overrides of each run as a label; with the folder of the run if it is too long or not unique."""
    labels = {run: overrides_text(row) for run, row in overrides.iterrows()}
    counts = Counter(labels.values())
    unique = {label for label in counts if label and counts[label] == 1 and len(label) <= LONG}
    return {
        str(run): label if label in unique else " ".join([str(run), label]).strip() for run, label in labels.items()
    }


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
