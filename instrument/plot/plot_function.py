"""The decorator and the registry of plot functions, and their input: a run, or a DataFrame with the columns of one of its tables.

The decorator fits the text of a figure: labels that would overlap are omitted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import signature
from itertools import pairwise
from textwrap import fill
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import pandas as pd

from ..analysis.load import Run
from ..analysis.plot_data import KEYS, PlottedTensor, RecordedSeries, check_choice, series_where, statistics_in
from ..errors import InstrumentError, Problem, similar_names
from ..fields.registry import Registry
from ..tables.schemas import TABLES
from ..tables.statistics import STATISTICS
from .look import CURRENT, Current, Look, current, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

P = ParamSpec("P")
NARROWEST = 2.0  # minimum width of a figure, in inches
CHECKS: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "width": (
        lambda width: isinstance(width, int | float) and width >= NARROWEST,
        "must be a width in inches",
        f"{NARROWEST:g} or more",
    ),
    "labels": (lambda labels: isinstance(labels, Mapping), "must be a mapping of texts to texts", ""),
    "scale": (lambda scale: scale in ("linear", "log"), "unknown scale", "linear, log"),
    "interval": (
        lambda level: isinstance(level, int | float) and 0 <= level < 1,
        "must be a confidence level",
        "0 to less than 1",
    ),
    "ax": (lambda ax: hasattr(ax, "get_subplotspec"), "must be axes of matplotlib", ""),
}  # by argument: whether a value is allowed, the message otherwise, and what is allowed
PLOTS: Registry[Any] = Registry(
    "plots",
    "plot",
    builtin={
        "attention": "instrument.interpret.attention_plot:attention",
        "class_activation_map": "instrument.interpret.plots:class_activation_map",
        "layer_similarity": "instrument.interpret.plots:layer_similarity",
        "logit_lens": "instrument.interpret.plots:logit_lens",
        "patching": "instrument.interpret.patching:patching",
    },
)


def plot(**refused: str) -> Callable[[Callable[P, Figure]], Callable[P, Figure]]:
    """Register a plot function, let it take the arguments of `Look`, and give its figure the common style.

    `refused`: arguments that have no meaning for the plot, with the reason.
    """

    def decorate(function: Callable[P, Figure]) -> Callable[P, Figure]:
        own = {name for name, each in signature(function).parameters.items() if each.kind is not each.VAR_KEYWORD}

        @wraps(function)
        def draw(*args: P.args, **kwargs: P.kwargs) -> Figure:
            names = [name for name in CHECKS if name in kwargs and name not in own]
            look: Any = {name: kwargs.pop(name) for name in names}
            if unknown := sorted(kwargs.keys() - own):
                similar = similar_names(unknown[0], [*own, *CHECKS])
                raise InstrumentError(Problem(unknown[0], f"{function.__name__} has no such argument", similar=similar))
            _check(look, function.__name__, refused)
            with style():
                token = CURRENT.set(Current(look))
                try:
                    others = [] if current().ax is None else current().ax.get_figure(root=True).axes  # type: ignore[union-attr]
                    figure = function(*args, **kwargs)
                    fit(figure, [axes for axes in figure.axes if axes not in others or axes is current().ax])
                finally:
                    CURRENT.reset(token)
            return figure

        draw.refused = refused  # type: ignore[attr-defined]
        if function.__name__ not in PLOTS.builtin:
            PLOTS.register(function.__name__)(draw)
        return draw

    return decorate


def _check(look: Look, name: str, refused: Mapping[str, str]) -> None:
    for key, reason in refused.items():
        if look.get(key) is not None:
            takes = [other for other, plot in PLOTS.items() if key not in getattr(plot, "refused", {key: ""})]
            allowed = f"in {', '.join(sorted(takes))}"
            raise InstrumentError(Problem(key, f"{name} {reason}", repr(look.get(key)), allowed))
    for key, (is_right, message, allowed) in CHECKS.items():
        if (value := look.get(key)) is not None and not is_right(value):
            raise InstrumentError(Problem(key, message, f"{value!r} ({type(value).__name__})", allowed))
    if look.get("ax") is not None and look.get("width") is not None:
        message = "axes have the width of their figure"
        raise InstrumentError(Problem("width", message, look.get("width"), fix="omit width or ax"))


GAP, ACROSS = 2.0, 6.0  # minimum distance of two labels above and next to each other, in pixels
MAX_TEXTS = 12  # maximum number of texts in an error message
BAR = "<colorbar>"  # the label that matplotlib gives the axes of a color bar


def fit(figure: Figure, drawn: Sequence[Axes]) -> None:
    """Replace texts by those of `labels`, and fit all text in the axes that a plot drew to the size of the figure."""
    every: list[Any] = [one for axes in drawn for one in (axes, *axes.child_axes)]
    place = current().place  # with the titles of the whole figure, or of the subfigure in the place of given axes
    above = [] if place is None else [text for text in place.texts if text.get_text()]
    _rename(every, above)
    figure.draw_without_rendering()
    before = _height(drawn)
    broken = [_wrap(text, place.bbox.height if text.get_rotation() else place.bbox.width) for text in above]  # type: ignore[union-attr]
    others = [axes for axes in figure.axes if axes.get_label() != BAR]
    for axes in every:
        for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
            broken.append(_wrap(text, _room(axes, others, is_vertical=text is axes.yaxis.label)))
    if any(broken):
        figure.draw_without_rendering()
        if current().grow(before - _height(drawn)):
            figure.draw_without_rendering()
    for axes in every:
        boxes = [box for *_, box in _labels(axes.xaxis)]
        if boxes and axes.xaxis.get_tick_params().get("rotation"):  # vertical labels that may have room to lie
            gap = min((b.x0 - a.x0 for a, b in pairwise(boxes)), default=axes.bbox.width)
            if max(box.height for box in boxes) + GAP <= gap:
                axes.xaxis.set_tick_params(rotation=0)
        _thin(axes.xaxis)
        _thin(axes.yaxis)
        _fit_cells(axes)


def _height(drawn: Sequence[Axes]) -> float:
    """Return the sum of the heights of the charts of the first column, in pixels."""
    specs = [(axes, axes.get_subplotspec()) for axes in drawn]
    return sum(axes.bbox.height for axes, spec in specs if spec is not None and spec.colspan.start == 0)


def _rename(drawn: Sequence[Axes], above: Sequence[Text]) -> None:
    """Replace the texts that are not names of data."""
    look = current()
    charts = [axes for axes in drawn if axes.get_label() != BAR]
    at = {text: text.get_position() for text in above}
    roles = {
        "title": [text for text in above if at[text][1] > 0.9] or [axes.title for axes in charts[:1]],
        "x": [*(axes.xaxis.label for axes in charts), *(text for text in above if at[text][1] < 0.1)],
        "y": [*(axes.yaxis.label for axes in charts), *(text for text in above if at[text][0] < 0.1)],
        "color": [axes.yaxis.label for axes in drawn if axes.get_label() == BAR],
    }
    for text in [*above, *(text for axes in drawn for text in (axes.title, axes.xaxis.label, axes.yaxis.label))]:
        if text.get_text() and (new := look.label(text.get_text())) is not None:
            text.set_text(new)
    for role in roles.keys() & look.labels.keys() - look.found:
        for text in roles[role]:
            text.set_text(look.labels[role] if text.get_text() else "")
    known = [text for text in look.texts if "\n" not in text]
    for key in (key for key in look.labels if key not in look.found and key not in roles):
        allowed = [*known[:MAX_TEXTS], *roles]
        similar = similar_names(key, known)
        raise InstrumentError(Problem("labels", "the figure has no such text", repr(key), allowed, similar))


def _room(axes: Axes, others: Sequence[Axes], *, is_vertical: bool) -> float:
    """Return the length of a text that is centered at a chart, in pixels: to the edges, and half the way to charts next to it."""
    along, across = ("intervaly", "intervalx") if is_vertical else ("intervalx", "intervaly")
    low, high = getattr(axes.bbox, across)
    whole, middle = getattr(axes.get_figure(root=False).bbox, along), getattr(axes.bbox, along).mean()  # type: ignore[union-attr]
    beside = [b for b in (each.bbox for each in others) if getattr(b, across)[0] < high and low < getattr(b, across)[1]]
    gaps = [abs(getattr(b, along).mean() - middle) for b in beside]
    return float(min([2 * (middle - whole[0]), 2 * (whole[1] - middle), *(gap for gap in gaps if gap > 1)]))


def _wrap(text: Text, room: float) -> bool:
    """Break the lines of a text that are longer than the room, in pixels, and return whether there are any."""
    before = shown = text.get_text()
    longest = max(map(len, shown.splitlines()), default=0)
    while longest > 8 and (length := _length(text)) > room - GAP:
        longest = min(longest - 1, int(longest * room / length))
        text.set_text("\n".join(fill(line, max(8, longest)) for line in shown.splitlines()))
    return text.get_text() != before


def _length(text: Text) -> float:
    box = text.get_window_extent()
    return box.height if text.get_rotation() else box.width


def _labels(axis: Axis) -> list[tuple[float, str, Bbox]]:
    """Return position, text and padded box of the visible labels of an axis."""
    ends = sorted(axis.get_view_interval())
    slack, found = 1e-6 * (ends[1] - ends[0]), []
    for at, label in zip(axis.get_majorticklocs().tolist(), axis.get_majorticklabels(), strict=False):
        if ends[0] - slack <= at <= ends[1] + slack and label.get_visible() and label.get_text():
            gap = GAP if label.get_rotation() else ACROSS
            found.append((at, label.get_text(), label.get_window_extent().padded(gap / 2, GAP / 2)))
    return found


def _thin(axis: Axis) -> None:
    """Show every n-th label of an axis if its labels overlap, with the smallest possible n."""
    labels = _labels(axis)
    for every in range(1, len(labels) + 1):
        shown = labels[::every]
        if not any(one[2].overlaps(two[2]) for one, two in pairwise(shown)):
            if every > 1:
                axis.set_ticks([at for at, *_ in shown], [text for _, text, _ in shown])
            return


def _fit_cells(axes: Axes) -> None:
    """Shorten the tokens in cells to the width of a cell; remove numbers that are wider than their cells."""
    corner, opposite = axes.transData.transform([(0, 0), (1, 1)])
    width, height = abs(opposite - corner) - 1.0
    texts = [text for text in axes.texts if text.get_gid() in ("number", "token")]
    for text in texts:
        shown = text.get_text()
        while text.get_gid() == "token" and len(shown) > 1 and text.get_window_extent().width > width:
            shown = shown.removesuffix("…")[:-1] + "…" if len(shown) > 2 else shown[:1]
            text.set_text(shown)
    boxes = [text.get_window_extent() for text in texts]
    if any(box.height > height or box.width > width for box in boxes):
        for text in texts:
            text.remove()


REQUIRED_COLUMNS = (*KEYS, "layer", "path", "step", "recompute")
FURTHER_COLUMNS = {
    "tensors": ("dtype", "source_shape"),
    "distributions": ("levels", "quantiles", "low", "high", "counts"),
}
MAX_RUNS = 6  # maximum number of run names in an error message
T = TypeVar("T", bound=PlottedTensor)


def table_of(data: Run | pd.DataFrame, table: str) -> pd.DataFrame:
    """Return a table of one run, or a DataFrame, unless it has no rows, contains several runs, or lacks a column."""
    check_source(data, table)
    if not isinstance(data, Run):
        return data
    frame: pd.DataFrame = getattr(data, table)
    check_columns(frame, table)
    return frame


def check_source(data: Run | pd.DataFrame, table: str) -> None:
    """Raise an InstrumentError unless the data are a single run, or rows with all columns of a table of a single run."""
    check_type(data)
    if isinstance(data, Run):
        check_single_run([folder.name for folder in data.folders])
    else:
        check_columns(data, table, (*REQUIRED_COLUMNS, *FURTHER_COLUMNS.get(table, ())))
        check_single_run(list(dict.fromkeys(data["run"])) if "run" in data else [])


def check_type(data: object, *, only_run: bool = False) -> None:
    """Raise an InstrumentError if the data are neither a run nor, unless `only_run`, rows."""
    if not isinstance(data, Run if only_run else Run | pd.DataFrame):
        fix = "for a probe, pass probe.run; for a folder, pass instrument.load(FOLDER)"
        message = "must be a run" + ("" if only_run else ", or a DataFrame of its rows")
        raise InstrumentError(Problem("run", message, type(data).__name__, fix=fix))


def check_columns(frame: pd.DataFrame, table: str, needed: Sequence[str] = REQUIRED_COLUMNS) -> None:
    """Raise an InstrumentError if a table is not a DataFrame, has no rows, or lacks a needed column."""
    if not isinstance(frame, pd.DataFrame):
        raise InstrumentError(f"this plot requires the {table} table, but a {type(frame).__name__} was given")
    if missing := [name for name in needed if name not in frame]:
        names = ", ".join(missing)
        raise InstrumentError(f"this plot requires columns that are missing from the {table} table: {names}")
    if frame.empty:
        of_table = " or ".join(map(repr, TABLES[table].fields)) if table in TABLES else ""
        settings = {"stats": "'stats'", "tensors": "'tensors: true'"}.get(table, of_table)
        fix = f"; set {settings} in a record hook" if settings else ""
        raise InstrumentError(f"the {table} table has no rows{fix}")


def check_single_run(runs: list[str]) -> None:
    """Raise an InstrumentError if there are several runs."""
    if len(runs) > 1:
        names = ", ".join(runs[:MAX_RUNS]) + (", ..." if len(runs) > MAX_RUNS else "")
        raise InstrumentError(
            f"this plot requires a single run, but {len(runs)} were given ({names}): "
            "load one of them, or use instrument.plot.compare"
        )


def at_layers(tensors: Sequence[T], layers: str | Sequence[str] | None, message: str, fix: str = "") -> list[T]:
    """Return the tensors of some layers or locations; with None, all of them. `message` and `fix` are about a layer without any."""
    wanted = [layers] if isinstance(layers, str) else layers
    if wanted is None:
        return list(tensors)
    names = [(one.location, one.layer or ".") for one in tensors]
    for layer in wanted:
        check_choice(layer, [name for both in names for name in both], "layer", message, fix)
    return [one for one, both in zip(tensors, names, strict=True) if not set(wanted).isdisjoint(both)]


def series_with(stats: pd.DataFrame, statistic: str | None) -> list[RecordedSeries]:
    """Return the series that have a value of a statistic, or with None of any; raise an InstrumentError if there are none."""
    there = statistics_in(stats)
    if statistic is None:
        return series_where(stats, lambda rows: bool(statistics_in(rows)))
    fix = f"add {statistic} to 'stats' in a record hook" if statistic in STATISTICS else ""
    check_choice(statistic, there, "statistic", "no hook recorded this statistic", fix)
    return series_where(stats, lambda rows: bool(rows[statistic].notna().any()))
