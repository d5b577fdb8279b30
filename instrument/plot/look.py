"""The arguments that all plots have in common: width, labels, scale, interval and axes; and the style, colors and labels of figures.

The style follows `matplotlib.rcParams`: the values of `STYLE` replace only those that have the default of matplotlib.
Categories use the palette of Okabe and Ito (2008), which is safe for color vision deficiencies. Magnitudes use `image.cmap` of
matplotlib, by default viridis. Signed values use RdBu, with red for positive values and zero in the middle.
This module does not import matplotlib.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from ..analysis.config_key_effects import CONFIDENCE
from ..fields.pip_extras import packages_of
from ..tables.statistics import statistic_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

CATEGORIES = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
SIGNED = "RdBu_r"
ZERO = "#9a9a9a"  # color of zeros on a logarithmic scale
WIDE = 100.0  # ratio of largest to smallest value from which a scale is logarithmic

_LABELS = {"count": "elements", "units": "fraction of units", "value": "", "custom": ""}  # of units with another name


def axis_name(statistic: str) -> str:
    """Return the name of a statistic with its unit, such as `l2` or `zero_fraction [fraction]`."""
    unit = statistic_of(statistic).unit
    label = _LABELS.get(unit, unit)
    return f"{statistic} [{label}]" if label and label not in statistic else statistic


MIN_SEEDS = 3  # number of seeds from which means are drawn with intervals, if `interval` is not given
SIZE = 8.0  # size of all text, in points
STYLE: dict[str, Any] = {
    "font.size": SIZE,
    **dict.fromkeys(("axes.titlesize", "axes.labelsize", "figure.titlesize", "figure.labelsize"), SIZE),
    **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "legend.fontsize"), SIZE),
    **{"lines.linewidth": 1.2, "grid.alpha": 0.3, "legend.frameon": False},
}
TRUETYPE: Any = {"pdf.fonttype": 42, "ps.fonttype": 42}  # Type 42: text in the file can be searched and edited


class CommonLook(TypedDict, total=False):
    """`Look` of a plot whose argument `scale` has another meaning."""

    width: float | None
    labels: Mapping[str, str] | None
    interval: float | None
    ax: Axes | None


class Look(CommonLook, total=False):
    """Arguments of all plots.

    Attributes:
        width: Width of the figure, in inches; all text has 8 points, or `font.size` of rcParams if it was changed.
            Default: a width that fits the data.
        labels: Texts that replace those of the figure, by the text: names of layers, runs, axes and legend entries. The
            keys `title`, `x`, `y` and `color` replace the titles of the figure, of the axes, and of the color bars.
            Formulas between dollar signs are allowed, and an empty text removes a title.
        scale: `linear` or `log`, of the values or of their colors. Default: log if all are positive and their ratio is
            100 or more.
        interval: Confidence level of the intervals of means over seeds, which are Student's t intervals; 0 for no
            intervals. Default: 0.95.
        ax: Axes to draw into, instead of a new figure. Several charts, and maps with tokens or channels, replace the axes by a
            subfigure, so the axes must belong to a grid, such as those of `pyplot.subplots(layout="constrained")`.
    """

    scale: Literal["linear", "log"] | None


class Current:
    """The arguments of the plot in progress, and the keys of `labels` that were found."""

    def __init__(self, look: Look) -> None:
        self.width, self.ax, self.scale = look.get("width"), look.get("ax"), look.get("scale")
        self.room = self.width  # width of the figure or of the given axes, in inches; None for the natural width
        if self.ax is not None:
            spec, figure = self.ax.get_subplotspec(), self.ax.get_figure(root=True)
            box = self.ax.get_position() if spec is None else spec.get_position(figure)  # type: ignore[arg-type]
            self.room = float(box.width * figure.get_figwidth())  # type: ignore[union-attr]
        self.labels = look.get("labels") or {}
        given = look.get("interval")
        self.interval, self.has_interval = CONFIDENCE if given is None else given, given is not None
        self.place: Figure | SubFigure | None = None  # the figure or the subfigure that the plot created
        self.found: set[str] = set()
        self.texts: dict[str, None] = {}

    def has_intervals(self, seeds: int) -> bool:
        """Return whether means over seeds are drawn with intervals: from three seeds, or from two with the argument."""
        return bool(self.interval) and seeds >= (2 if self.has_interval else MIN_SEEDS)

    def grow(self, pixels: float) -> bool:
        """Make a figure of given width higher, so that a longer legend or title does not take room from the charts."""
        if self.width is None or self.place is None or pixels <= 0:
            return False
        self.place.set_figheight(self.place.get_figheight() + pixels / self.place.dpi)  # type: ignore[union-attr]
        return True

    def label(self, text: str) -> str | None:
        """Return the replacement of a text, if there is one."""
        self.texts[text] = None
        if text in self.labels:
            self.found.add(text)
        return self.labels.get(text)


CURRENT: ContextVar[Current] = ContextVar("look", default=Current({}))  # noqa: B039


def current() -> Current:
    """Return the arguments of the plot in progress; the defaults outside of a plot."""
    return CURRENT.get()


def style() -> AbstractContextManager[None]:
    """Return a context in which figures have the style of this package, unless `matplotlib.rcParams` was changed.

    Raise an InstrumentError if matplotlib is not installed.
    """
    with packages_of("report", "a plot"):
        from matplotlib import rc_context, rcParams, rcParamsDefault
        from matplotlib.rcsetup import cycler
    wanted = STYLE | TRUETYPE | {"axes.prop_cycle": cycler(color=CATEGORIES)}
    if rcParams["font.size"] != rcParamsDefault["font.size"]:
        wanted |= {name: rcParams["font.size"] for name, value in STYLE.items() if value == SIZE}
    return rc_context({name: value for name, value in wanted.items() if rcParams[name] == rcParamsDefault[name]})
