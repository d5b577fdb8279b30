"""Heat map of the similarity of layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..analysis.plot_data import short_names
from ..plot.axes_and_scales import (
    LONGEST,
    add_legend,
    draw_cells,
    height_of,
    new_figure,
    plain,
    width_of,
)
from ..plot.style import MAGNITUDE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

CELL, WIDEST = 0.38, 9.0  # width of a cell, and maximum width of the chart without labels, in inches


def layer_similarity(table: pd.DataFrame) -> Figure:
    """Plot the similarity of layers as a heat map, from 0 to 1.

    Args:
        table: The result of `instrument.interpret.layer_similarity`.

    Returns:
        The matplotlib figure.

    Raises:
        InstrumentError: matplotlib is not installed.
    """
    rows, columns = ([str(name) for name in names] for names in (table.index, table.columns))
    values = table.to_numpy(np.float64)
    width = min(WIDEST, max(2.0, CELL * len(columns)))
    height = max(height_of(len(rows)), min(WIDEST, CELL * len(rows)))
    figure = new_figure(width + width_of(rows) + 1.3, height + width_of(columns) + 0.8)
    axes = figure.subplots()
    names, missing = short_names(columns, LONGEST), "constant or not finite"
    labels, look = [plain(names[name]) for name in columns], {"cmap": MAGNITUDE, "vmin": 0.0, "vmax": 1.0}
    draw_cells(axes, values, rows, labels, size=(width, height), label="linear CKA", missing=missing, **look)
    add_legend(figure)
    samples = table.attrs.get("samples")
    axes.set_title("similarity of layers" + (f", {samples:,} samples" if samples else ""), fontsize=10)
    return figure
