"""Heat maps of what casts to narrow formats would lose, by layer and format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import numpy as np
import pandas as pd

from ..analysis.load import Run
from ..analysis.plot_data import forward_order, rank_in
from .axes_and_scales import charts_beside, draw_cells, finished, height_of, plain, width_of
from .look import Look
from .plot_function import plot
from .source import check_columns, table_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

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
    error, underflow = (
        frame.groupby(["layer", "cast"], observed=True)[name].mean().unstack().reindex(index=layers, columns=labels)
        for name in VALUES
    )
    ratio = -10.0 * np.log10(error.where(error > 0).to_numpy(np.float64))
    percent = 100.0 * underflow.to_numpy(np.float64)
    names = [layer or "." for layer in layers]
    width, height = 2 * (max(1.6, CELL * len(labels)) + 0.9) + width_of(names), height_of(len(layers))
    charts = charts_beside(width, height + width_of(labels) + 0.8, 2)
    for axes, values, title, least in zip(charts.flat, (ratio, percent), TITLES, (None, 0.0), strict=True):
        most = None if least is None else max(1.0, float(np.nanmax(values, initial=0.0)))
        axes.set_title(title)
        missing = "not recorded, zero, or without an error"
        shown = [plain(label) for label in labels]
        draw_cells(axes, values, names, shown, height=height, label=title, missing=missing, vmin=least, vmax=most)
        axes.set_ylabel("layer, in forward order")
        axes.label_outer()
    return finished(charts)
