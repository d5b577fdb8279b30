"""Heat map of the similarity of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

import numpy as np
import pandas as pd

from ..analysis.plot_data import short_names
from ..plot.axes_and_scales import LONGEST, colours, draw_cells, finished, height_of, new_charts, plain, width_of
from ..plot.look import Look
from ..plot.plot_function import plot
from ..plot.source import check_columns

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELL, WIDEST = 0.38, 9.0  # width of a cell, and maximum width of the chart without labels, in inches


@plot(interval="draws a single run, so there are no means over seeds")
def layer_similarity(table: pd.DataFrame, **look: Unpack[Look]) -> Figure:
    """Plot the similarity of layers as a heat map, from 0 to 1.

    Args:
        table: The result of `instrument.interpret.layer_similarity`.
        look: Width, labels, scale and axes of the figure; see `instrument.plot.Look`.

    Raises:
        InstrumentError: `table` is not such a table.
    """
    check_columns(table, "layer similarity", ())
    rows, columns = ([str(name) for name in names] for names in (table.index, table.columns))
    values = table.to_numpy(np.float64)
    width = min(WIDEST, max(2.0, CELL * len(columns)))
    height = max(height_of(len(rows)), min(WIDEST, CELL * len(rows)))
    charts = new_charts(width + width_of(rows) + 1.3, height + width_of(columns) + 0.8)
    names, missing = short_names(columns, LONGEST), "constant or not finite"
    labels, scale = [plain(names[name], name=name) for name in columns], colours(values, limits=(0.0, 1.0))
    draw_cells(charts[0, 0], values, rows, labels, height=height, label="linear CKA", missing=missing, **scale)
    samples = table.attrs.get("samples")
    return finished(charts, "similarity of layers" + (f", {samples:,} samples" if samples else ""))
