"""Common functions of all plots: figure size, short names, axes of locations and steps, and color scales."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log10
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..analysis.plot_data import Matrix, short_names
from ..analysis.tensor_images import limits as symmetric_limits
from ..errors import InstrumentError, Problem
from ..tables.statistics import statistic_of
from .look import CATEGORIES, SIGNED, WIDE, ZERO, current

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure, SubFigure

    from .figure import Picture

LETTER = 0.065  # width of a character, in inches
ROW = 0.17  # height of the row of a location, in inches
MAX_ROWS = 240  # maximum number of row labels
LONGEST = 44  # maximum length of a name, in characters
MAX_NUMBERS = 300  # maximum number of cells whose values are written into them
MAX_DECIMALS = 4  # maximum number of decimals of a number in a cell
LONGEST_TOKEN = 12  # maximum length of the label of a token, in characters
INVISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "↵"})
BLANK = "#d9d9d9"  # color of missing values
PAD = 0.08  # padding around a chart, in inches
NAMES = 0.38  # maximum share of the width for names of rows
WIDEST = 8.0  # the width of which it is without the argument, in inches
FLAT = 0.62  # maximum ratio of height to width of charts of lines
SIDE_BY_SIDE = 5.5  # width from which two charts are side by side, in inches
FEW = 2.0  # minimum height of a chart, in inches
POINTS = 60  # maximum number of points of a line with markers


def new_figure(width: float, height: float) -> Picture:
    """Create an empty figure; the size is in inches. The width is that of the argument `width` of the plot, if it was given."""
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    from .figure import Picture

    figure = Picture(figsize=(width_or(width), height), layout=ConstrainedLayoutEngine(w_pad=PAD, h_pad=PAD))
    current().place = figure
    return figure


def new_charts(
    width: float, height: float, rows: int = 1, columns: int = 1, *, as_grid: bool = False, **grid: Any
) -> np.ndarray:
    """Create the charts of a plot, [rows, columns]; or, of a plot with the argument `ax`, return these axes or charts in their place.

    `width` and `height` are the natural ones of the figure, in inches. `as_grid`: whether the plot sets titles of the whole figure, so that
    a single chart is not drawn into `ax` itself. `grid`: arguments of `Figure.subplots`.
    """
    ax = current().ax
    if ax is not None and rows == columns == 1 and not as_grid:
        return np.array([[ax]])
    if ax is None:
        place: Picture | SubFigure = new_figure(width, height)
    else:
        spec, figure = ax.get_subplotspec(), ax.get_figure(root=False)
        if spec is None or figure is None:
            fix = "pass axes of figure.subplots() or figure.add_subplot()"
            raise InstrumentError(Problem("ax", "several charts need axes that belong to a grid", fix=fix))
        ax.remove()
        current().place = place = figure.add_subfigure(spec)
    charts: np.ndarray = place.subplots(rows, columns, squeeze=False, **grid)
    return charts


def charts_beside(width: float, height: float, count: int, **beside: Any) -> np.ndarray:
    """Create charts next to each other, with arguments of `Figure.subplots`; below each other if the figure is narrow."""
    if count > 1 and is_narrow(width):
        return new_charts(width, height * count, count, 1)
    return new_charts(width, height, 1, count, **beside)


def figure_of(charts: np.ndarray) -> Figure:
    """Return the figure that contains charts."""
    figure: Figure = charts.flat[0].get_figure(root=True)
    return figure


def finished(charts: np.ndarray, title: str | None = None, *, at_side: bool = False, **labels: str) -> Figure:
    """Set the title, `xlabel` and `ylabel` of the first chart, add the legend of all charts, and return their figure."""
    charts.flat[0].set(**labels if title is None else {**labels, "title": plain(title, 80)})
    add_legend(charts, at_side=at_side)
    return figure_of(charts)


def width_or(natural: float) -> float:
    """Return the width of the figure or of the given axes, in inches; without these arguments, the natural width."""
    return current().room or natural


def height_or(natural: float) -> float:
    """Return the height of a chart of lines, in inches; at most `FLAT` of the width."""
    return min(natural, FLAT * width_or(natural / FLAT))


def is_narrow(natural: float) -> bool:
    """Return whether charts that are `natural` inches wide side by side must be placed below each other."""
    return width_or(natural) < min(natural, SIDE_BY_SIDE)


def colour_of(index: int) -> str:
    """Return a color of the cycle of `matplotlib.rcParams`, which is the palette of this package unless it was changed."""
    from matplotlib import rcParams

    colours: list[str] = rcParams["axes.prop_cycle"].by_key().get("color", CATEGORIES)
    return colours[index % len(colours)]


def plain(text: str, most: int = LONGEST, *, name: str | None = None) -> str:
    """Escape a text for matplotlib, and shorten it in the middle if it is longer than `most` characters.

    If the argument `labels` of the plot has another text for the full `name`, or for the text, this is returned.
    """
    if (other := current().label(text if name is None else name)) is not None:
        return other
    if len(text) > most:
        text = f"{text[: (most - 1) // 2]}…{text[-(most // 2) :]}"
    text = text.replace("$", r"\$")  # matplotlib renders text between two dollar signs as a formula
    return f" {text}" if text.startswith("_") else text  # legends omit labels that begin with an underscore


def height_of(locations: int) -> float:
    """Return the height, in inches, of a chart with one row per location."""
    return max(FEW, ROW * min(locations, MAX_ROWS))


def width_of(locations: Sequence[str]) -> float:
    """Return the width, in inches, of the names of the locations."""
    return LETTER * max((min(len(name), LONGEST) for name in locations), default=0)


def label_locations(axes: Axes, locations: Sequence[str], *, middle: float = 0.0) -> None:
    """Label the rows of the vertical axis from top to bottom; if there are too many rows, only every n-th is labeled.

    `middle` is the vertical position of the center of the first row.
    """
    shown = range(0, len(locations), -(-max(1, len(locations)) // MAX_ROWS))
    most = min(LONGEST, int(NAMES * width_or(WIDEST) / LETTER))
    short = short_names(locations, most)
    labels = [plain(short[name], most, name=name) for name in (locations[i] for i in shown)]
    axes.set_yticks([i + middle for i in shown], labels)
    axes.set_ylim(len(locations) - 0.5 + middle, middle - 0.5)


def label_steps(axes: Axes, first: Sequence[int], *, middle: float = 0.5) -> None:
    """Label the columns of the horizontal axis with their first steps.

    `middle` is the position of a label within its column, which has the width 1.
    """
    axes.set_xticks([i + middle for i in range(len(first))], [f"{step:,}" for step in first])
    axes.set_xlim(0, len(first))


def label_columns(axes: Axes, labels: Sequence[str]) -> None:
    """Label the columns of a heat map; the labels are vertical unless there is room for horizontal ones."""
    shown = range(len(labels)) if any(labels) else ()
    axes.set_xticks([i + 0.5 for i in shown], [labels[i] for i in shown])
    axes.tick_params(axis="x", rotation=90)


def draw_line(axes: Axes, line: pd.Series, label: str, colour: str, dashes: str) -> None:
    """Draw values over steps, with a cross at the last one before the first value that is not finite."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 2.5, 5, 10], integer=True, min_n_ticks=1))
    values = line.to_numpy(np.float64)
    marker = "." if len(line) <= POINTS else None
    axes.plot(line.index, values, color=colour, linestyle=dashes, marker=marker, label=label)
    bad = np.flatnonzero(~np.isfinite(values))
    if bad.size and bad[0]:
        last = bad[0] - 1
        lost = "not finite from this step on"
        axes.plot(line.index[last], values[last], "x", color=colour, markersize=8, label=lost)


def draw_zeros(axes: Axes, values: np.ndarray) -> None:
    """Draw the cells that are zero and therefore have no color on a logarithmic scale."""
    from matplotlib.colors import ListedColormap

    axes.pcolormesh(np.ma.masked_where(values != 0.0, values), cmap=ListedColormap([ZERO]))


def merge_note(table: Matrix, recorded: int, merged: str, several: bool) -> str:
    """Return the part of an axis label that explains how values of the recorded steps, or several values in one step, were merged."""
    if table.is_grouped:
        return f" (groups of up to {-(-recorded // len(table.first))}: {merged})"
    return f" ({merged} of several in a step)" if several else ""


def needs_log_scale(values: np.ndarray) -> bool:
    """Return whether values need a logarithmic scale: all are positive, and max / min is at least `WIDE`."""
    finite = values[np.isfinite(values)]
    return bool(finite.size) and bool(finite.min() > 0 and finite.max() >= WIDE * finite.min())


def scale(axes: Axes, name: Literal["x", "y"], values: np.ndarray, *, is_log: bool | None = None) -> None:
    """Set a linear or logarithmic axis; by default, as the argument `scale` of the plot says, or as the values need it.

    A logarithmic axis over few decades has ticks at 1, 2 and 5 times powers of ten, otherwise at powers of ten only.
    """
    from matplotlib.ticker import LogLocator

    positive = values[np.isfinite(values) & (values > 0)]
    if is_log is None:
        is_log = needs_log_scale(values) if current().scale is None else current().scale == "log"
    if current().scale == "log" and not positive.size:
        raise InstrumentError(Problem("scale", "a logarithmic scale requires positive values", "log", "linear"))
    axes.set(**{f"{name}scale": "log" if is_log else "linear"})
    axis = axes.xaxis if name == "x" else axes.yaxis
    if is_log:
        axis.set_minor_formatter("")
    if is_log and positive.size and positive.max() < WIDE * positive.min():
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")


def colours(
    values: np.ndarray, statistic: str | None = None, *, limits: tuple[float | None, float | None] | None = None
) -> dict[str, Any]:
    """Return the color scale of values as arguments of `pcolormesh` and `imshow`; fractions have the range 0 to 1.

    `limits` are those of a linear scale. Default: zero, or minus the largest magnitude if values are negative, and the largest magnitude.
    Raise an InstrumentError if the argument `scale` of the plot is `log`, and values are negative, or none is positive.
    """
    if statistic is not None and statistic_of(statistic).unit in ("fraction", "units"):
        limits = (0.0, 1.0)
    chosen = current().scale
    positive, has_negative = values[np.isfinite(values) & (values > 0)], (values < 0).any()
    if chosen == "log" or (chosen is None and limits is None and not has_negative and needs_log_scale(positive)):
        if not positive.size or has_negative:
            raise InstrumentError(Problem("scale", "a logarithmic scale requires positive values", "log", "linear"))
        return {"cmap": None, "norm": "log", "vmin": float(positive.min()), "vmax": float(positive.max())}
    low, high = symmetric_limits(values) if limits is None else limits
    return {"cmap": SIGNED if low is not None and low < 0 else None, "vmin": low, "vmax": high}


def colour_bar(axes: Axes, drawn: ScalarMappable, label: str, height: float) -> None:
    """Add a color bar with a limited height to a chart that is `height` inches high."""
    bar = axes.figure.colorbar(drawn, ax=axes, shrink=min(1.0, 4.0 / height), aspect=25, anchor=(0.0, 1.0), pad=0.02)
    bar.set_label(plain(label))
    bar.ax.grid(False)


def write_numbers(axes: Axes, values: np.ndarray, cells: ScalarMappable, widths: np.ndarray | None = None) -> None:
    """Write the values [rows, columns] into the cells of a heat map if they are few; `fit` removes them if cells are narrow."""
    if values.size > MAX_NUMBERS:
        return
    largest = float(np.nanmax(np.abs(values), initial=0.0, where=np.isfinite(values)))
    decimals = max(0, 2 - ceil(log10(largest))) if largest else 0  # two digits of the largest value
    for (y, x), value in np.ndenumerate(values):
        if np.isfinite(value):
            form = ".2g" if decimals > MAX_DECIMALS else f"z.{decimals}f"
            has_width = widths is not None and np.isfinite(widths[y, x])
            number = f"{value:{form}}" + (f"\n±{widths[y, x]:{form}}" if has_width else "")  # type: ignore[index]
            write_cell(axes, x, y, number, shade_on(cells, value), "number")


def write_cell(axes: Axes, x: int, y: int, text: str, colour: str, kind: Literal["number", "token"]) -> None:
    """Write a text into a cell of a heat map; `fit` removes numbers, and shortens tokens, that are wider than the cell."""
    axes.text(x + 0.5, y + 0.5, text, ha="center", va="center", color=colour, gid=kind)


def draw_cells(
    axes: Axes,
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    height: float,
    label: str,
    missing: str,
    widths: np.ndarray | None = None,
    **look: Any,
) -> None:
    """Draw a heat map of values [rows, columns] with their numbers, a color bar, and a hatch for missing values.

    `height`: that of the chart, in inches. `missing`: the meaning of values that are not finite. `widths`: half the widths of the
    intervals of the values; NaN for none. `look`: the color scale, as arguments of `pcolormesh`.
    """
    axes.grid(False)
    cells = axes.pcolormesh(np.ma.masked_invalid(values), **look)
    label_locations(axes, rows, middle=0.5)
    label_columns(axes, columns)
    if not np.isfinite(values).all():
        add_hatch(axes, 0, len(columns), missing)
    write_numbers(axes, values, cells, widths)
    colour_bar(axes, cells, label, height)


def shade_on(cells: ScalarMappable, value: float) -> str:
    """Return black or white, whichever differs more from the color of a value."""
    red, green, blue, _ = cells.to_rgba(np.array(value))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def token_label(token: str) -> str:
    """Return a token as a short label in which blanks and control characters are visible."""
    shown = token.translate(INVISIBLE)
    return plain(shown if shown.isprintable() else shown.encode("unicode_escape").decode(), LONGEST_TOKEN)


def add_legend(charts: np.ndarray, *, at_side: bool = False) -> None:
    """Add one legend for all charts below them, or at the right if it takes less than a third of the width of the figure.

    Each label is shown once.
    """
    handles: dict[str, Artist] = {}
    for axes in charts.flat:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if not handles:
        return
    place = current().place
    texts = [current().label(label) or fill(label, int((width_or(WIDEST) - 0.6) / LETTER)) for label in handles]
    if place is None:  # below the given axes and their labels
        from matplotlib.transforms import ScaledTranslation

        axes = charts.flat[0]
        figure = figure_of(charts)
        figure.draw_without_rendering()
        below = (axes.bbox.y0 - axes.get_tightbbox().y0) / figure.dpi + 0.03
        where = axes.transAxes + ScaledTranslation(0.0, -below, figure.dpi_scale_trans)
        axes.legend(handles.values(), texts, loc="upper right", bbox_to_anchor=(1.0, 0.0), bbox_transform=where)
        return
    beside, below = "outside right upper", "outside lower center"
    options: Any = [(beside, 1, 1.0 if current().room is None else 1 / 3)] * at_side
    for loc, columns, most in [*options, (below, 3, 0.98), (below, 2, 0.98), (below, 1, np.inf)]:
        legend = place.legend(handles.values(), texts, loc=loc, ncols=columns)
        box = legend.get_window_extent()
        if box.width < most * place.bbox.width:
            current().grow(box.height if loc == below else 0.0)
            return
        legend.remove()


def add_hatch(axes: Axes, start: float, stop: float, meaning: str) -> None:
    """Fill columns, or the background of a chart, with a gray hatch that marks missing values."""
    axes.axvspan(start, stop, facecolor=BLANK, hatch="////", edgecolor="white", linewidth=0.0, zorder=0, label=meaning)
