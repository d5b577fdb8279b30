"""Heat maps: of a statistic over layers and steps, and of what casts to narrow formats would lose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import numpy as np
import pandas as pd

from ..analysis.load import Run
from ..analysis.plot_data import forward_order, matrices, rank_in, row_locations, select_series, statistics_in
from ..tables.statistics import statistic_of
from . import axes_and_scales as draw
from .look import ZERO, Look, axis_name
from .plot_function import check_columns, plot, series_with, table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_STEPS = 200  # maximum number of columns
WIDTH = 6.0  # width of the chart without labels, in inches


@plot(interval="draws a single run, so there are no means over seeds")
def heatmap(
    run: Run | pd.DataFrame,
    statistic: str | None = None,
    *,
    hook: str | None = None,
    kind: str | None = None,
    role: str | None = None,
    phase: str | None = None,
    **look: Unpack[Look],
) -> Figure:
    """Plot a statistic as a heat map: layers from top to bottom in forward order, steps from left to right.

    If more than 200 steps were recorded, neighboring steps share a column, and the axis label says so.

    Args:
        run: A run, or rows of its stats table. The layers of a DataFrame are ordered by their recorded outputs, or by
            row if no outputs were recorded.
        statistic: Name of the statistic. Default: `l2` for gradients, updates and parameters, `std` for outputs.
        hook: Name of the hook that recorded the statistic; required if several hooks did.
        kind: Kind of the hook, such as `forward`.
        role: Role of the tensor, such as `output`.
        phase: Phase of the hook, such as `eval`. Default: `train` if it was recorded.
        look: Width, labels, scale and axes of the figure; see `instrument.plot.Look`.

    Raises:
        InstrumentError: No data matches the arguments or more than one series matches them.
    """
    stats = table_of(run, "stats")
    series = select_series(series_with(stats, statistic), hook=hook, kind=kind, role=role, phase=phase)
    rows = series.of(stats)
    name = statistic or series.shown_first(statistics_in(rows))
    counted = [count for count in series.problem_counts if count in rows]
    tables = matrices(rows, list(dict.fromkeys([name, *counted])), forward_order(run), MAX_STEPS)
    table = tables[name]
    height = draw.height_of(len(table.locations))
    charts = draw.new_charts(WIDTH + draw.width_of(table.locations) + 1.2, height + 1.1)
    axes = charts[0, 0]
    scale = draw.colours(table.values, name)
    axes.grid(False)
    cells = axes.pcolormesh(np.ma.masked_invalid(table.values), **scale)
    draw.label_locations(axes, table.locations, middle=0.5)
    draw.label_steps(axes, table.first.tolist(), middle=0.0 if table.is_grouped else 0.5)
    draw.colour_bar(axes, cells, axis_name(name), height)
    # Cells that have no color: missing values, zeros on a logarithmic scale, and non-finite tensors.
    if np.isnan(table.values).any():
        draw.add_hatch(axes, 0, table.values.shape[1], "no value: not recorded or not finite")
    if (table.values == 0.0).any() and "norm" in scale:
        draw.draw_zeros(axes, table.values)
        axes.plot([], [], "s", color=ZERO, label="zero (not on the logarithmic scale)")
    bad = np.sum([np.nan_to_num(tables[count].values) for count in counted], axis=0)
    if bad.any():
        places = np.argwhere(bad) + 0.5
        size = float(np.clip(300.0 / max(table.values.shape), 1.5, 5.0))
        label = "has NaN or infinite elements"
        axes.plot(places[:, 1], places[:, 0], "x", markersize=size, color=draw.colour_of(5), label=label)
    ylabel = f"{'parameter' if series.is_of_parameters else 'layer'}, in forward order"
    several = bool(pd.DataFrame({"at": row_locations(rows, []), "step": rows["step"]}).duplicated().any())
    xlabel = "step" + draw.merge_note(table, rows["step"].nunique(), statistic_of(name).merged, several)
    return draw.finished(charts, f"{name} of {series.label}", xlabel=xlabel, ylabel=ylabel)


CELL = 0.42  # width of a cell, in inches
VALUES = ("quantization_error", "underflow_fraction")
TITLES = ("signal-to-noise ratio [dB]", "underflows [%]")


@plot(
    interval="draws a single run, so there are no means over seeds", scale="shows decibels and percent on linear scales"
)
def casts(run: Run | pd.DataFrame, **look: Unpack[Look]) -> Figure:
    """Plot the signal-to-noise ratio of casts, -10 log10(quantization_error) in dB, and the fraction of underflows in percent.

    Rows are layers in forward order, columns are hooks with the format of their cast. Errors and fractions are means over the recorded
    steps, calls and tensors of a layer.

    Args:
        run: A run, or rows of its table `casts`. The layers of a DataFrame are ordered by row.
        look: Width, labels and axes of the figure; see `instrument.plot.Look`.

    Raises:
        InstrumentError: The table has no rows.
    """
    table = table_of(run, "casts")
    check_columns(table, "casts", ("format", *VALUES))
    frame = table[~table["recompute"]]
    frame = frame.assign(cast=frame["hook"].astype(str) + ": " + frame["format"].astype(str))
    layers, labels = (list(dict.fromkeys(frame[name].astype(str))) for name in ("layer", "cast"))
    layers.sort(key=rank_in(forward_order(run)))
    groups = frame.groupby(["layer", "cast"], observed=True)
    error, underflow = (groups[name].mean().unstack().reindex(index=layers, columns=labels) for name in VALUES)
    ratio = -10.0 * np.log10(error.where(error > 0).to_numpy(np.float64))
    percent = 100.0 * underflow.to_numpy(np.float64)
    names = [layer or "." for layer in layers]
    width, height = 2 * (max(1.6, CELL * len(labels)) + 0.9) + draw.width_of(names), draw.height_of(len(layers))
    charts = draw.charts_beside(width, height + draw.width_of(labels) + 0.8, 2)
    for axes, values, title, least in zip(charts.flat, (ratio, percent), TITLES, (None, 0.0), strict=True):
        most = None if least is None else max(1.0, float(np.nanmax(values, initial=0.0)))
        axes.set_title(title)
        missing = "not recorded, zero, or without an error"
        shown = [draw.plain(label) for label in labels]
        draw.draw_cells(axes, values, names, shown, height=height, label=title, missing=missing, vmin=least, vmax=most)
        axes.set_ylabel("layer, in forward order")
        axes.label_outer()
    return draw.finished(charts)
