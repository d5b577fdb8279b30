"""Heat map of a statistic over layers and steps."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..analysis.load import Run
from ..analysis.series import Matrix, Series, forward_order, matrices, places_in, statistics_in
from ..analysis.series_selection import choose
from ..spec.statistics import STATISTICS
from .canvas import (
    colour_bar,
    colours,
    explain,
    grouping,
    has_log_colours,
    hatch,
    height_of,
    name_places,
    name_steps,
    new_figure,
    plain,
    width_of,
)
from .source import series_with, table_of
from .style import CATEGORIES, ZERO, axis_name

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 6.0  # width of the chart without labels, in inches
NON_FINITE = ("nan_count", "inf_count")


def heatmap(
    run: Run | pd.DataFrame,
    statistic: str | None = None,
    *,
    hook: str | None = None,
    kind: str | None = None,
    role: str | None = None,
    phase: str = "train",
    most_steps: int = 200,
) -> Figure:
    """Plot a statistic as a heat map: layers from top to bottom in forward order, steps from left to right.

    Args:
        run: A run, or rows of its stats table. The layers of a DataFrame are ordered by their recorded outputs, or by
            row if no outputs were recorded.
        statistic: Name of the statistic. Default: `l2` for gradients, updates and parameters, `std` for outputs.
        hook: Name of the hook that recorded the statistic; required if several hooks did.
        kind: Kind of the hook, such as `forward`.
        role: Role of the tensor, such as `output`.
        phase: `train` or `eval`.
        most_steps: Maximum number of columns. If more steps were recorded, neighboring steps share a column, and the
            axis label says so.

    Returns:
        The matplotlib figure.

    Raises:
        InstrumentError: No data matches the arguments, more than one series matches them, or matplotlib is not
            installed.
    """
    stats = table_of(run, "stats")
    series = choose(series_with(stats, statistic), hook=hook, kind=kind, role=role, phase=phase)
    rows = series.of(stats)
    name = statistic or _telling(series, statistics_in(rows))
    counted = [count for count in NON_FINITE if count in rows]
    tables = matrices(rows, list(dict.fromkeys([name, *counted])), forward_order(run), most_steps)
    table = tables[name]
    height = height_of(len(table.places))
    figure = new_figure(WIDTH + width_of(table.places) + 1.2, height + 1.1)
    axes = figure.subplots()
    _draw(axes, table, name, height)
    _mark(axes, table, np.sum([np.nan_to_num(tables[count].values) for count in counted], axis=0))
    explain(figure)
    axes.set_title(plain(f"{name} of {series.label}", 80), fontsize=10)
    axes.set_ylabel(f"{'parameter' if series.is_of_parameters else 'layer'}, in forward order")
    several = bool(pd.DataFrame({"at": places_in(rows, []), "step": rows["step"]}).duplicated().any())
    merged = STATISTICS[name].merged
    axes.set_xlabel("step" + grouping(table, rows["step"].nunique(), merged, several))
    return figure


def _telling(series: Series, there: list[str]) -> str:
    """Return the default statistic of a series, or the first recorded one."""
    first = "l2" if series.is_gradient or series.is_of_parameters else "std"
    return first if first in there else there[0]


def _draw(axes: Axes, table: Matrix, statistic: str, height: float) -> None:
    """Draw the cells, the axes and the color bar."""
    cells = axes.pcolormesh(np.ma.masked_invalid(table.values), **colours(table.values, statistic))
    name_places(axes, table.places, middle=0.5)
    name_steps(axes, table.first.tolist(), WIDTH, middle=0.0 if table.is_grouped else 0.5)
    colour_bar(axes, cells, axis_name(statistic), height)


def _mark(axes: Axes, table: Matrix, bad: np.ndarray) -> None:
    """Mark cells that have no color: missing values, zeros on a logarithmic scale, and non-finite tensors."""
    from matplotlib.colors import ListedColormap

    if np.isnan(table.values).any():
        hatch(axes, 0, table.values.shape[1], "no value: not recorded, or not finite")
    zeros = table.values == 0.0
    if zeros.any() and has_log_colours(table.values):
        axes.pcolormesh(np.ma.masked_where(~zeros, table.values), cmap=ListedColormap([ZERO]))
        axes.plot([], [], "s", color=ZERO, label="zero, which a logarithmic scale has no colour for")
    if bad.any():
        rows, columns = np.nonzero(bad)
        size = float(np.clip(300.0 / max(table.values.shape), 1.5, 5.0))
        axes.plot(
            columns + 0.5, rows + 0.5, "x", markersize=size, color=CATEGORIES[5], label="has NaN or infinite elements"
        )
