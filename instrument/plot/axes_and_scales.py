"""Common functions of all plots: figure size, short names, axes of locations and steps, and color scales."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, log10
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..analysis.plot_data import Matrix, short_names
from ..analysis.tensor_images import limits
from ..errors import InstrumentError
from ..fields.pip_extras import pip_command
from ..tables.statistics import statistic_of
from .style import MAGNITUDE, SIGNED, WIDE, ZERO

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

    from .figure import Picture

SMALL, NORMAL = 7.5, 9.0  # font sizes, in points
LETTER = 0.065  # width of a character of a small label, in inches
ROW = 0.17  # height of the row of a location, in inches
MAX_ROWS = 240  # maximum number of row labels
LONGEST = 44  # maximum length of a name, in characters
MAX_NUMBERS = 300  # maximum number of cells whose values are written into them
MAX_DECIMALS = 4  # maximum number of decimals of a number in a cell
LONGEST_TOKEN = 12  # maximum length of the label of a token, in characters
INVISIBLE = str.maketrans({" ": "␣", "\n": "↵", "\t": "⇥", "\r": "↵"})
BLANK = "#d9d9d9"  # color of missing values
PAD = 0.08  # padding around a chart, in inches
FEW = 2.0  # minimum height of a chart, in inches
POINTS = 60  # maximum number of points of a line with markers


def new_figure(width: float, height: float) -> Picture:
    """Create an empty figure; the size is in inches.

    Raises:
        InstrumentError: matplotlib is not installed.
    """
    try:
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        from .figure import Picture
    except ModuleNotFoundError as error:
        raise InstrumentError(f"plots require {error.name}: {pip_command('report')}") from None
    return Picture(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=PAD, h_pad=PAD))


def plain(text: str, most: int = LONGEST) -> str:
    """Escape a text for matplotlib, and shorten it in the middle if it is longer than `most` characters."""
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
    short = short_names(locations, LONGEST)
    axes.set_yticks([i + middle for i in shown], [plain(short[locations[i]]) for i in shown], fontsize=SMALL)
    axes.set_ylim(len(locations) - 0.5 + middle, middle - 0.5)


def label_steps(axes: Axes, first: Sequence[int], width: float, *, middle: float = 0.5) -> None:
    """Label the columns of the horizontal axis, which is `width` inches wide, with their first steps, as many as fit.

    `middle` is the position of a label within its column, which has the width 1.
    """
    letters = max((len(f"{step:,}") for step in first), default=1)
    room = max(1, int(width / (LETTER * letters + 0.25)))
    shown = range(0, len(first), -(-max(1, len(first)) // room))
    axes.set_xticks([i + middle for i in shown], [f"{first[i]:,}" for i in shown], fontsize=SMALL)
    axes.set_xlim(0, len(first))


def label_columns(axes: Axes, labels: Sequence[str], width: float) -> None:
    """Label the columns of a heat map, which is `width` inches wide, as many as fit; long labels are vertical."""
    cell = width / len(labels)
    is_wide = max(map(len, labels)) * LETTER > cell - 0.05
    every = max(1, ceil((0.14 if is_wide else LETTER) / cell))
    shown = range(0, len(labels), every) if any(labels) else ()
    axes.set_xticks([i + 0.5 for i in shown], [labels[i] for i in shown], fontsize=SMALL)
    axes.tick_params(axis="x", rotation=90 if is_wide else 0)


def draw_line(axes: Axes, line: pd.Series, label: str, colour: str, dashes: str) -> None:
    """Draw values over steps, with a cross at the last one before the first value that is not finite."""
    values = line.to_numpy(np.float64)
    marker = "." if len(line) <= POINTS else None
    axes.plot(line.index, values, color=colour, linestyle=dashes, marker=marker, linewidth=1.2, label=label)
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
    """Return the part of an axis label that explains how values were merged; empty if no values were merged.

    Args:
        table: The matrix that is drawn.
        recorded: Number of recorded steps in the matrix.
        merged: How several values are merged, such as `mean`.
        several: Whether a location has several values in one step.
    """
    if table.is_grouped:
        return f" (groups of up to {-(-recorded // len(table.first))}: {merged})"
    return f" ({merged} of several in a step)" if several else ""


def needs_log_scale(values: np.ndarray) -> bool:
    """Return whether values need a logarithmic scale: all are positive, and max / min is at least `WIDE`."""
    finite = values[np.isfinite(values)]
    return bool(finite.size) and bool(finite.min() > 0 and finite.max() >= WIDE * finite.min())


def needs_log_colours(values: np.ndarray) -> bool:
    """Return whether the color scale is logarithmic; zeros among the values have no color on it."""
    finite = values[np.isfinite(values)]
    return bool((finite >= 0).all()) and needs_log_scale(finite[finite > 0])


def scale(axes: Axes, name: Literal["x", "y"], values: np.ndarray, *, is_log: bool | None = None) -> None:
    """Set a linear or logarithmic axis with small tick labels; by default, as the values need it.

    A logarithmic axis over few decades has ticks at 1, 2 and 5 times powers of ten, otherwise at powers of ten only.
    """
    from matplotlib.ticker import LogLocator

    is_log = needs_log_scale(values) if is_log is None else is_log
    axes.set(**{f"{name}scale": "log" if is_log else "linear"})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_tick_params(labelsize=SMALL)
    positive = values[np.isfinite(values) & (values > 0)]
    if is_log:
        axis.set_minor_formatter("")
    if is_log and positive.size and positive.max() < WIDE * positive.min():
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")


def colours(values: np.ndarray, statistic: str | None = None) -> dict[str, Any]:
    """Return the color scale of values as arguments of `pcolormesh` and `imshow`; fractions have the range 0 to 1."""
    if statistic is not None and statistic_of(statistic).unit in ("fraction", "units"):
        return {"cmap": MAGNITUDE, "vmin": 0.0, "vmax": 1.0}
    if needs_log_colours(values):
        positive = values[np.isfinite(values) & (values > 0)]
        return {"cmap": MAGNITUDE, "norm": "log", "vmin": float(positive.min()), "vmax": float(positive.max())}
    low, high = limits(values)
    return {"cmap": SIGNED if low < 0 else MAGNITUDE, "vmin": low, "vmax": high}


def colour_bar(axes: Axes, drawn: ScalarMappable, label: str, height: float) -> None:
    """Add a color bar with a limited height to a chart that is `height` inches high."""
    bar = axes.figure.colorbar(drawn, ax=axes, shrink=min(1.0, 4.0 / height), aspect=25, anchor=(0.0, 1.0), pad=0.02)
    bar.set_label(plain(label), fontsize=NORMAL)
    bar.ax.tick_params(labelsize=SMALL)


def write_numbers(axes: Axes, values: np.ndarray, cells: ScalarMappable, width: float) -> None:
    """Write the values [rows, columns] into the cells of a heat map of `width` inches, if they are few and wide enough."""
    if values.size > MAX_NUMBERS or width / values.shape[1] < 5 * LETTER:
        return
    largest = float(np.nanmax(np.abs(values), initial=0.0, where=np.isfinite(values)))
    decimals = max(0, 2 - ceil(log10(largest))) if largest else 0  # two digits of the largest value
    for (y, x), value in np.ndenumerate(values):
        if np.isfinite(value):
            shade = shade_on(cells, value)
            number = f"{value:.2g}" if decimals > MAX_DECIMALS else f"{value:z.{decimals}f}"
            axes.text(x + 0.5, y + 0.5, number, ha="center", va="center", fontsize=SMALL - 1, color=shade)


def draw_cells(
    axes: Axes,
    values: np.ndarray,
    rows: Sequence[str],
    columns: Sequence[str],
    *,
    size: tuple[float, float],
    label: str,
    missing: str,
    **look: Any,
) -> None:
    """Draw a heat map of values [rows, columns] with their numbers, a color bar, and a hatch for missing values.

    Args:
        size: The width and the height of the chart, in inches.
        label: The label of the color bar.
        missing: The meaning of values that are not finite.
        look: The color scale, as arguments of `pcolormesh`.
    """
    width, height = size
    cells = axes.pcolormesh(np.ma.masked_invalid(values), **look)
    label_locations(axes, rows, middle=0.5)
    label_columns(axes, columns, width)
    if not np.isfinite(values).all():
        add_hatch(axes, 0, len(columns), missing)
    write_numbers(axes, values, cells, width)
    colour_bar(axes, cells, label, height)


def shade_on(cells: ScalarMappable, value: float) -> str:
    """Return black or white, whichever differs more from the color of a value."""
    red, green, blue, _ = cells.to_rgba(np.array(value))
    return "black" if 0.299 * red + 0.587 * green + 0.114 * blue > 0.5 else "white"


def token_label(token: str) -> str:
    """Return a token as a short label in which blanks and control characters are visible."""
    shown = token.translate(INVISIBLE)
    return plain(shown if shown.isprintable() else shown.encode("unicode_escape").decode(), LONGEST_TOKEN)


def add_legend(figure: Figure, *, beside: bool = False) -> None:
    """Add one legend for all charts, below them or at the right; labels that occur several times are shown once."""
    handles: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        where: Literal["outside right upper", "outside lower right"]
        where = "outside right upper" if beside else "outside lower right"
        columns = 1 if beside else 3
        figure.legend(handles.values(), handles, loc=where, ncols=columns, fontsize=SMALL, frameon=False)


def add_hatch(axes: Axes, start: float, stop: float, meaning: str) -> None:
    """Fill columns, or the background of a chart, with a gray hatch that marks missing values."""
    axes.axvspan(start, stop, facecolor=BLANK, hatch="////", edgecolor="white", linewidth=0.0, zorder=0, label=meaning)
