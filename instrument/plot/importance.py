"""Plot of the importance of the overrides of a sweep."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

import numpy as np
import pandas as pd

from ..analysis.config_key_effects import importance_of
from ..analysis.load import Run
from .axes_and_scales import colour_of, finished, height_of, label_locations, new_charts, scale, width_of
from .compare import final_values
from .look import Look, current
from .plot_function import plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WIDTH = 3.4  # width of the chart without labels, in inches


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
    charts = new_charts(WIDTH + width_of(names), max(1.0, height_of(0) * len(names) / 6) + 1.0)
    axes = charts[0, 0]
    rows = range(len(names))
    shares = table["importance"].to_numpy()
    axes.barh(rows, shares, height=0.7, color=colour_of(0))
    if current().interval:
        ends = np.abs(table[["low", "high"]].to_numpy().T - shares)
        axes.errorbar(shares, rows, xerr=ends, fmt="none", ecolor="black", capsize=2)
    scale(axes, "x", shares, is_log=current().scale == "log")
    if current().scale != "log":
        axes.set_xlim(0.0, 1.0)
    label_locations(axes, names)
    axes.grid(axis="x")
    bars = f"; bars: {100 * current().interval:g}% intervals" if current().interval else ""
    return finished(charts, f"importance for {title}", xlabel=f"fraction of the variance\n{len(values)} runs{bars}")
