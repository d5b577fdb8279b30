"""The recorded histograms and quantiles of one tensor over the steps."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ..analysis.choice import choose_place, spread
from ..analysis.load import Run
from .canvas import SMALL, colour_bar, colours, explain, hatch, name_steps, new_figure, plain
from .source import table_of
from .style import CATEGORIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 7.0, 3.8  # inches of the chart itself
LINE = CATEGORIES[5]
STYLES = ("--", ":", "-.")  # of the pairs of quantiles, from the inmost outwards


def histogram_over_time(
    run: Run | pd.DataFrame,
    layer: str,
    *,
    hook: str | None = None,
    kind: str | None = None,
    role: str | None = None,
    phase: str = "train",
    most_steps: int = 200,
) -> Figure:
    """The histograms of one place, a column a step with the bins that were recorded, and its quantiles over them.

    A colour is the share of the step's finite elements that are in the bin. Of several calls in a step the first is shown.

    Args:
        run: A run, or rows of its distributions table.
        layer: A layer or a parameter: `encoder.0`, `encoder.0.weight`.
        hook: Which spec recorded it, where several did.
        kind: The hook's kind.
        role: Which of the kind's tensors.
        phase: `train` or `eval`.
        most_steps: Columns; beyond, they are of steps evenly chosen, and the axis says so.

    Raises:
        InstrumentError: Nothing fits, several series or places do, or matplotlib is not installed.
    """
    frame = table_of(run, "distributions")
    series, place, rows = choose_place(frame, layer, hook=hook, kind=kind, role=role, phase=phase)
    once = rows.drop_duplicates("step")
    shown = once.iloc[spread(len(once), most_steps)]
    figure = new_figure(WIDTH + 1.5, HEIGHT + 1.0)
    axes = figure.subplots()
    _draw_histograms(axes, shown)
    _draw_quantiles(axes, shown)
    explain(figure)
    name_steps(axes, shown["step"].tolist(), WIDTH)
    axes.tick_params(axis="y", labelsize=SMALL)
    axes.set_title(plain(f"{place} ({series.label})", 80), fontsize=10)
    axes.set_ylabel("value of an element")
    axes.set_xlabel("step" if len(shown) == len(once) else f"step ({len(shown)} of {len(once):,} recorded)")
    return figure


def _draw_histograms(axes: Axes, rows: pd.DataFrame) -> None:
    """A column for each step that has a histogram, all in the same colours; hatched where nothing was finite."""
    cells = list(zip(rows["low"], rows["high"], rows["counts"], strict=True))
    counted = [at for at, (_, _, counts) in enumerate(cells) if counts is not None]
    shares = {at: share_of(cells[at][2]) for at in counted if np.isfinite(cells[at][0])}
    span = float(np.nanmax(rows["high"]) - np.nanmin(rows["low"])) if shares else 0.0
    scale = colours(np.concatenate([share[share > 0] for share in shares.values()])) if shares else {}
    drawn = None
    for at, share in shares.items():
        low, high, _ = cells[at]
        edges = edges_of(low, high, len(share), span)
        drawn = axes.pcolormesh([at, at + 1], edges, np.ma.masked_equal(share, 0.0)[:, None], **scale)
    if drawn is not None:
        colour_bar(axes, drawn, "share of the step's finite elements", HEIGHT)
    for at in counted:
        if at not in shares:
            hatch(axes, at, at + 1, "nothing finite")


def share_of(counts: Sequence[int]) -> np.ndarray:
    """Counts as fractions of their sum; float64, shape [bins]."""
    numbers: np.ndarray = np.asarray(counts, np.float64)
    return numbers / float(numbers.sum())


def edges_of(low: float, high: float, bins: int, span: float) -> np.ndarray:
    """The edges of a histogram's bins, shape [bins + 1]; of equal elements, which are all in the first bin, a thin line.

    Args:
        low: The smallest element.
        high: The largest one.
        bins: Their number.
        span: What the whole chart spans.
    """
    if high > low:
        return np.linspace(low, high, bins + 1)
    half = (max(0.004 * span, 1e-6 * abs(low)) if span else 0.01 * abs(low)) or 0.01
    return np.array([low - half, *np.full(bins, low + half)])


def _draw_quantiles(axes: Axes, rows: pd.DataFrame) -> None:
    """The median, and pairs of quantiles around it: lines over histograms, and bands where there are none."""
    found = [
        dict(zip(levels, values, strict=True)) if values is not None else {}
        for levels, values in zip(rows["levels"], rows["quantiles"], strict=True)
    ]
    table = {
        level: [float(row.get(level, np.nan)) for row in found] for level in sorted({q for row in found for q in row})
    }
    edges = np.arange(len(rows) + 1)
    has_bins = bool(rows["counts"].notna().any())
    pairs = [(q, other) for q in table for other in table if q < other and abs(q + other - 1.0) < 1e-9]
    for style, (below, above) in zip(cycle(STYLES), reversed(pairs), strict=False):
        label = f"{below:.4g} to {above:.4g} quantile"
        if has_bins:
            for level in (below, above):
                axes.stairs(table[level], edges, baseline=None, color=LINE, linestyle=style, label=label)
        else:
            axes.stairs(
                table[above], edges, baseline=table[below], fill=True, alpha=0.3, color=CATEGORIES[0], label=label
            )
    paired = {level for pair in pairs for level in pair}
    for level in [level for level in table if level not in paired]:
        name = "median" if level == 0.5 else f"{level:.4g} quantile"
        axes.stairs(table[level], edges, baseline=None, color=LINE, linewidth=2.0, label=name)
