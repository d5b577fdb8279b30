"""What all pictures are drawn with: a figure of the right size, names that fit, axes of places and steps, colours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from ..analysis.maps import limits
from ..analysis.names import short_names
from ..analysis.series import Matrix
from ..errors import InstrumentError
from ..extras import pip_command
from ..spec.statistics import STATISTICS
from .style import MAGNITUDE, SIGNED, WIDE

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

    from .picture import Picture

SMALL, NORMAL = 7.5, 9.0  # points
LETTER = 0.065  # inches that a letter of a small label takes
ROW = 0.17  # inches that a place takes
MOST_ROWS = 240  # labels that a figure has room for
LONGEST = 44  # letters of a name
BLANK = "#d9d9d9"  # where there is no value
PAD = 0.08  # inches around a chart
FEW = 2.0  # inches that are the least for a chart


def new_figure(width: float, height: float) -> Picture:
    """An empty figure.

    Args:
        width: Inches.
        height: Inches.

    Raises:
        InstrumentError: matplotlib is not installed.
    """
    try:
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        from .picture import Picture
    except ModuleNotFoundError as error:
        raise InstrumentError(f"pictures need {error.name}: {pip_command('report')}") from None
    layout = ConstrainedLayoutEngine(w_pad=PAD, h_pad=PAD)
    return Picture(figsize=(width, height), layout=layout)


def plain(text: str, most: int = LONGEST) -> str:
    """A text that matplotlib draws as it is written, shortened in the middle."""
    if len(text) > most:
        text = f"{text[: (most - 1) // 2]}…{text[-(most // 2) :]}"
    text = text.replace("$", r"\$")  # else what is between two of them is a formula
    return f" {text}" if text.startswith("_") else text  # else it is left out of a legend


def height_of(places: int) -> float:
    """Inches for a chart with a row for each place."""
    return max(FEW, ROW * min(places, MOST_ROWS))


def width_of(places: Sequence[str]) -> float:
    """Inches that the places' names take."""
    return LETTER * max((min(len(name), LONGEST) for name in places), default=0)


def name_places(axes: Axes, places: Sequence[str], *, middle: float = 0.0) -> None:
    """Names on the vertical axis, the first one on top; every so many-th where they are too many.

    Args:
        axes: To be named.
        places: In their order.
        middle: Where the first one's row has its middle.
    """
    shown = range(0, len(places), -(-max(1, len(places)) // MOST_ROWS))
    short = short_names(places, LONGEST)
    axes.set_yticks([i + middle for i in shown], [plain(short[places[i]]) for i in shown], fontsize=SMALL)
    axes.set_ylim(len(places) - 0.5 + middle, middle - 0.5)


def name_steps(axes: Axes, first: Sequence[int], width: float, *, middle: float = 0.5) -> None:
    """Numbers of steps on the horizontal axis, below columns of width 1, as many as there is room for.

    Args:
        axes: To be named.
        first: The number of each column.
        width: Inches of the axis.
        middle: Where in its column a number stands.
    """
    letters = max((len(f"{step:,}") for step in first), default=1)
    room = max(1, int(width / (LETTER * letters + 0.25)))
    shown = range(0, len(first), -(-max(1, len(first)) // room))
    axes.set_xticks([i + middle for i in shown], [f"{first[i]:,}" for i in shown], fontsize=SMALL)
    axes.set_xlim(0, len(first))


def grouping(table: Matrix, recorded: int, merged: str, several: bool) -> str:
    """What a column of a matrix stands for, behind `step`; empty where it is one value as recorded.

    Args:
        table: The matrix.
        recorded: The number of steps that are in it.
        merged: What became of several values.
        several: Whether a step has several values of one place.
    """
    if table.is_grouped:
        return f" (groups of up to {-(-recorded // len(table.first))}: {merged})"
    return f" ({merged} of several in a step)" if several else ""


def is_wide(values: np.ndarray) -> bool:
    """Whether values need a logarithmic scale: all are above zero, and the largest is many times the smallest."""
    finite = values[np.isfinite(values)]
    return bool(finite.size) and bool(finite.min() > 0 and finite.max() >= WIDE * finite.min())


def has_log_colours(values: np.ndarray) -> bool:
    """Whether colours are logarithmic, on which zeros among the values have none."""
    finite = values[np.isfinite(values)]
    return bool((finite >= 0).all()) and is_wide(finite[finite > 0])


def scale(axes: Axes, name: Literal["x", "y"], values: np.ndarray, *, is_log: bool) -> None:
    """An axis for values, with small numbers: a logarithmic one over few decades has them at 1, 2 and 5, else at 1 only."""
    from matplotlib.ticker import LogLocator

    axes.set(**{f"{name}scale": "log" if is_log else "linear"})
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_tick_params(labelsize=SMALL)
    known = values[np.isfinite(values) & (values > 0)]
    if is_log:
        axis.set_minor_formatter("")
    if is_log and known.size and known.max() < WIDE * known.min():
        axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.set_major_formatter("{x:g}")


def colours(values: np.ndarray, statistic: str | None = None) -> dict[str, Any]:
    """The colour scale of values, as arguments of `pcolormesh` and `imshow`; that of a fraction goes from 0 to 1."""
    if statistic is not None and STATISTICS[statistic].unit in ("fraction", "units"):
        return {"cmap": MAGNITUDE, "vmin": 0.0, "vmax": 1.0}
    if has_log_colours(values):
        positive = values[np.isfinite(values) & (values > 0)]
        return {"cmap": MAGNITUDE, "norm": "log", "vmin": float(positive.min()), "vmax": float(positive.max())}
    low, high = limits(values)
    return {"cmap": SIGNED if low < 0 else MAGNITUDE, "vmin": low, "vmax": high}


def colour_bar(axes: Axes, drawn: ScalarMappable, label: str, height: float) -> None:
    """The scale beside a chart, never taller than a hand.

    Args:
        axes: The chart.
        drawn: What has the colours.
        label: What they mean, with its unit.
        height: Inches of the chart.
    """
    bar = axes.figure.colorbar(drawn, ax=axes, shrink=min(1.0, 4.0 / height), aspect=25, anchor=(0.0, 1.0), pad=0.02)
    bar.set_label(plain(label), fontsize=NORMAL)
    bar.ax.tick_params(labelsize=SMALL)


def explain(figure: Figure, *, beside: bool = False) -> None:
    """A legend below all charts, or beside them, with each meaning once; nothing where nothing has a label."""
    found: dict[str, Artist] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    if found:
        where: Literal["outside right upper", "outside lower right"]
        where = "outside right upper" if beside else "outside lower right"
        columns = 1 if beside else 3
        figure.legend(found.values(), found, loc=where, ncols=columns, fontsize=SMALL, frameon=False)


def hatch(axes: Axes, start: float, stop: float, meaning: str) -> None:
    """Columns of a chart, or what is left free of it, grey and hatched: there is no value."""
    axes.axvspan(start, stop, facecolor=BLANK, hatch="////", edgecolor="white", linewidth=0.0, zorder=0, label=meaning)
