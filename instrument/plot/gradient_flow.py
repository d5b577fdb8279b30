"""Plot of the gradient norms of all layers at the first and last step, with the update ratios."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Unpack

import numpy as np
import pandas as pd

from ..analysis.load import Run
from ..analysis.plot_data import forward_order, matrices, row_locations, select_series, statistics_in
from ..errors import InstrumentError
from ..tables.statistics import USUAL_UPDATE_RATIOS
from . import axes_and_scales as draw
from .look import Look, axis_name, current
from .plot_function import plot, series_with, table_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from ..analysis.plot_data import Matrix, RecordedSeries

WIDTH = 4.5  # width of a chart, in inches
ENDS = (("first", 1, "o"), ("last", 0, "s"))
USUAL = "usual update ratios, 1e-4 to 1e-2 (CS231n, neural-networks-3)"


class FirstAndLast(NamedTuple):
    """The values of a statistic of a series at the first and the last recorded step, which may be the same."""

    statistic: str
    series: RecordedSeries
    table: Matrix
    is_recorded: np.ndarray  # whether there are rows of a location at a step; bool, shape of the values


@plot(interval="draws a single run, so there are no means over seeds")
def gradient_flow(
    run: Run | pd.DataFrame,
    *,
    hook: str | None = None,
    kind: str | None = None,
    role: str | None = None,
    phase: str | None = None,
    **look: Unpack[Look],
) -> Figure:
    """Plot the gradient norms of all layers at the first and the last recorded step, on a logarithmic axis.

    If `update_ratio` was recorded, a second chart shows it with the usual range. The charts share their rows if the
    gradients are those of the same parameters; otherwise the second chart is placed below the first.

    Args:
        run: A run, or rows of its stats table.
        hook, kind, role, phase: Select the recorded series; see `heatmap`. By default, hooks of kind `parameter_grad` are
            preferred.
        look: Width, labels, scale and axes of the figure; see `instrument.plot.Look`.

    Raises:
        InstrumentError: No `l2` norm of a gradient was recorded or more than one series matches the arguments.
    """
    stats = table_of(run, "stats")
    order = forward_order(run)
    candidates = [series for series in series_with(stats, "l2") if series.is_gradient]
    if not candidates:
        raise InstrumentError("no gradients were recorded: pass hooks=gradients to record all of them")
    usual = [series for series in candidates if series.kind == "parameter_grad"]
    is_open = hook is None and kind is None and role is None
    series = select_series(usual if usual and is_open else candidates, hook=hook, kind=kind, role=role, phase=phase)
    charts = [_first_and_last(stats, series, "l2", order)]
    if "update_ratio" in statistics_in(stats):
        charts.append(_first_and_last(stats, series_with(stats, "update_ratio")[0], "update_ratio", order))
    return _draw_figure(charts)


def _first_and_last(stats: pd.DataFrame, series: RecordedSeries, statistic: str, order: list[str]) -> FirstAndLast:
    rows = series.of(stats)
    rows = rows[rows["step"].isin([rows["step"].min(), rows["step"].max()])]
    table = matrices(rows, [statistic], order, 2)[statistic]
    return FirstAndLast(statistic, series, table, pd.crosstab(row_locations(rows, order), rows["step"]).to_numpy() > 0)


def _draw_figure(charts: list[FirstAndLast]) -> Figure:
    """Draw one chart, two charts with shared rows, or two charts below each other."""
    locations = charts[0].table.locations
    wide = draw.width_of([name for chart in charts for name in chart.table.locations])
    width = wide + WIDTH * len(charts) + 0.5
    if all(set(chart.table.locations) <= set(locations) for chart in charts) and not draw.is_narrow(width):
        panels = draw.new_charts(width, draw.height_of(len(locations)) + 1.4, 1, len(charts), sharey=True)
        rows = [locations] * len(charts)
    else:
        rows = [chart.table.locations for chart in charts]
        heights = [draw.height_of(len(names)) for names in rows]
        panels = draw.new_charts(
            wide + WIDTH + 1.5, sum(heights) + 1.2 * len(charts), len(charts), 1, height_ratios=heights
        )
    for axes, chart, names in zip(panels.flat, charts, rows, strict=True):
        _draw(axes, chart, names)
    for axes in panels[:, 0]:
        axes.set_ylabel("in forward order")
    return draw.finished(panels)


def _draw(axes: Axes, chart: FirstAndLast, rows: list[str]) -> None:
    at = np.array([rows.index(location) for location in chart.table.locations])
    shown = np.where(chart.table.values > 0, chart.table.values, np.nan)
    low, high = (function.reduce(shown, axis=1) for function in (np.fmin, np.fmax))
    axes.hlines(at, low, high, color="#bbbbbb", linewidth=1.0, zorder=1)
    for column, (end, colour, mark) in enumerate(ENDS[: len(chart.table.first)]):
        axes.plot(
            shown[:, column], at, mark, color=draw.colour_of(colour), markersize=4.5, label=f"{end} recorded step"
        )
    band = USUAL_UPDATE_RATIOS if chart.statistic == "update_ratio" else ()
    if band:
        axes.axvspan(*band, color=draw.colour_of(2), alpha=0.15, linewidth=0.0, label=USUAL)
    draw.scale(axes, "x", np.append(shown, band), is_log=current().scale != "linear")
    draw.label_locations(axes, rows)
    axes.grid(axis="x")
    axes.set_title(draw.plain(f"{chart.statistic} of {chart.series.label}", 70))
    steps = " and ".join(f"{step:,}" for step in chart.table.first.tolist())
    axes.set_xlabel("\n".join([f"{axis_name(chart.statistic)}, at step {steps}", *_notes(chart)]))


def _notes(chart: FirstAndLast) -> list[str]:
    """Return notes on the values that a logarithmic axis cannot show."""
    notes = []
    steps = chart.table.first.tolist()
    for step, values, is_recorded in zip(steps, chart.table.values.T, chart.is_recorded.T, strict=True):
        omitted = {"zero": values == 0, "not finite": np.isnan(values) & is_recorded, "not recorded": ~is_recorded}
        counts = [f"{where.sum()} {name}" for name, where in omitted.items() if where.any()]
        if counts:
            notes.append(f"not shown at step {step:,}: {', '.join(counts)}")
    return notes
