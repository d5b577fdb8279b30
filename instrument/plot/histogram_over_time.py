"""Plot of the recorded histograms and quantiles of one tensor over the steps."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
import pandas as pd

from ..analysis.load import Run
from ..analysis.plot_data import evenly_spaced, select_location
from .axes_and_scales import add_hatch, colour_bar, colour_of, colours, finished, height_or, label_steps, new_charts
from .look import Look
from .plot_function import plot, table_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_STEPS = 200  # maximum number of columns
WIDTH, HEIGHT = 7.0, 3.8  # size of the chart without labels, in inches
LINE = 5  # color of quantiles
STYLES = ("--", ":", "-.")  # line styles of pairs of quantiles, starting with the innermost pair


@plot(interval="draws a single run, so there are no means over seeds")
def histogram_over_time(
    run: Run | pd.DataFrame,
    layer: str,
    *,
    hook: str | None = None,
    kind: str | None = None,
    role: str | None = None,
    phase: str | None = None,
    **look: Unpack[Look],
) -> Figure:
    """Plot the histograms of one location over the steps, with its quantiles as lines.

    Each column is one step, with the recorded bins. The color is the fraction of the finite elements of the step in the
    bin. If a module is called several times in a step, the first call is shown. Of more than 200 steps, evenly spaced ones are shown.

    Args:
        run: A run, or rows of its distributions table.
        layer: A layer or a parameter: `encoder.0`, `encoder.0.weight`.
        hook, kind, role, phase: Select the recorded series; see `heatmap`.
        look: Width, labels and axes of the figure, and scale of the fractions; see `instrument.plot.Look`.

    Raises:
        InstrumentError: No data matches the arguments, or more than one series or location matches them.
    """
    frame = table_of(run, "distributions")
    series, location, rows = select_location(frame, layer, hook=hook, kind=kind, role=role, phase=phase)
    once = rows.drop_duplicates("step")
    shown = once.iloc[evenly_spaced(len(once), MAX_STEPS)]
    charts = new_charts(WIDTH + 1.5, height_or(HEIGHT) + 1.0)
    axes = charts[0, 0]
    axes.grid(False)
    _draw_histograms(axes, shown)
    _draw_quantiles(axes, shown)
    label_steps(axes, shown["step"].tolist())
    xlabel = "step" if len(shown) == len(once) else f"step ({len(shown)} of {len(once):,} recorded)"
    return finished(charts, f"{location} ({series.label})", xlabel=xlabel, ylabel="value of an element")


def _draw_histograms(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw one column per step that has a histogram, with a common color scale; one without finite values is hatched."""
    cells = list(zip(rows["low"], rows["high"], rows["counts"], strict=True))
    counted = [at for at, (_, _, counts) in enumerate(cells) if counts is not None]
    counts_of = {at: np.asarray(cells[at][2], np.float64) for at in counted if np.isfinite(cells[at][0])}
    shares = {at: counts / counts.sum() for at, counts in counts_of.items()}
    span = float(np.nanmax(rows["high"]) - np.nanmin(rows["low"])) if shares else 0.0
    scale = colours(np.concatenate([share[share > 0] for share in shares.values()])) if shares else {}
    drawn = None
    for at, share in shares.items():
        low, high, _ = cells[at]
        edges = edges_of(low, high, len(share), span)
        drawn = axes.pcolormesh([at, at + 1], edges, np.ma.masked_equal(share, 0.0)[:, None], **scale)
    if drawn is not None:
        colour_bar(axes, drawn, "fraction of the step's finite elements", HEIGHT)
    for at in counted:
        if at not in shares:
            add_hatch(axes, at, at + 1, "no finite elements")


def edges_of(low: float, high: float, bins: int, span: float) -> np.ndarray:
    """Return the edges of the bins of a histogram in a chart with a range of `span`; float64, shape [bins + 1].

    If all elements are equal, they are all in the first bin, which is drawn as a thin line.
    """
    if high > low:
        return np.linspace(low, high, bins + 1)
    half = (max(0.004 * span, 1e-6 * abs(low)) if span else 0.01 * abs(low)) or 0.01
    return np.array([low - half, *np.full(bins, low + half)])


def _draw_quantiles(axes: Axes, rows: pd.DataFrame) -> None:
    """Draw the median and pairs of quantiles: as lines over histograms, otherwise as bands."""
    cells = zip(rows["levels"], rows["quantiles"], strict=True)
    quantiles = [{} if values is None else dict(zip(levels, values, strict=True)) for levels, values in cells]
    levels = sorted({level for row in quantiles for level in row})
    table = {level: [float(row.get(level, np.nan)) for row in quantiles] for level in levels}
    edges = np.arange(len(rows) + 1)
    has_bins = bool(rows["counts"].notna().any())
    pairs = [(q, other) for q in table for other in table if q < other and abs(q + other - 1.0) < 1e-9]
    for style, (below, above) in zip(cycle(STYLES), reversed(pairs), strict=False):
        label = f"{below:.4g} to {above:.4g} quantile"
        if has_bins:
            for level in (below, above):
                axes.stairs(table[level], edges, baseline=None, color=colour_of(LINE), linestyle=style, label=label)
        else:
            band: dict[str, Any] = {"fill": True, "alpha": 0.3, "color": colour_of(0), "label": label}
            axes.stairs(table[above], edges, baseline=table[below], **band)
    paired = {level for pair in pairs for level in pair}
    for level in [level for level in table if level not in paired]:
        name = "median" if level == 0.5 else f"{level:.4g} quantile"
        axes.stairs(table[level], edges, baseline=None, color=colour_of(LINE), label=name)
