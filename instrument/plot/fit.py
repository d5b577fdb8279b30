"""Fit of the text of a drawn figure: long texts get several lines, and labels that would overlap are omitted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from ..errors import InstrumentError, Problem, similar_names
from .look import current

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from matplotlib.text import Text
    from matplotlib.transforms import Bbox

GAP, ACROSS = 2.0, 6.0  # minimum distance of two labels above and next to each other, in pixels
MAX_TEXTS = 12  # maximum number of texts in an error message
BAR = "<colorbar>"  # the label that matplotlib gives the axes of a color bar


def fit(figure: Figure, drawn: Sequence[Axes]) -> None:
    """Replace texts by those of `labels`, and fit all text to the size of the figure.

    Args:
        figure: The figure, which is laid out.
        drawn: The axes that the plot added or drew into.
    """
    every: list[Any] = [one for axes in drawn for one in (axes, *axes.child_axes)]
    _rename(every)
    figure.draw_without_rendering()
    before = _height(drawn)
    broken = []
    for text in _texts():
        whole = text.get_figure(root=False).bbox  # type: ignore[union-attr]
        broken.append(_wrap(text, whole.height if text.get_rotation() else whole.width))
    others = [axes for axes in figure.axes if axes.get_label() != BAR]
    for axes in every:
        wide, high = _room(axes, others)
        broken += [_wrap(axes.title, wide), _wrap(axes.xaxis.label, wide), _wrap(axes.yaxis.label, high)]
    if any(broken):
        figure.draw_without_rendering()
        if current().grow(before - _height(drawn)):
            figure.draw_without_rendering()
    for axes in every:
        _turn(axes.xaxis)
        _thin(axes.xaxis)
        _thin(axes.yaxis)
        _fit_cells(axes)


def _height(drawn: Sequence[Axes]) -> float:
    """Return the sum of the heights of the charts of the first column, in pixels."""
    specs = [(axes, axes.get_subplotspec()) for axes in drawn]
    return sum(axes.bbox.height for axes, spec in specs if spec is not None and spec.colspan.start == 0)


def _texts() -> list[Text]:
    """Return the titles of the whole figure, or of the subfigure that the plot added to the figure of given axes."""
    place = current().place
    return [] if place is None else [text for text in place.texts if text.get_text()]


def _rename(drawn: Sequence[Axes]) -> None:
    """Replace the texts that are not names of data."""
    look = current()
    charts = [axes for axes in drawn if axes.get_label() != BAR]
    above = _texts()
    titles = [text for text in above if text.get_position()[1] > 0.9] or [axes.title for axes in charts[:1]]
    roles = {
        "title": titles,
        "x": [*(axes.xaxis.label for axes in charts), *(text for text in above if text.get_position()[1] < 0.1)],
        "y": [*(axes.yaxis.label for axes in charts), *(text for text in above if text.get_position()[0] < 0.1)],
        "color": [axes.yaxis.label for axes in drawn if axes.get_label() == BAR],
    }
    for text in [*above, *(text for axes in drawn for text in (axes.title, axes.xaxis.label, axes.yaxis.label))]:
        if text.get_text() and (new := look.label(text.get_text())) is not None:
            text.set_text(new)
    for role, texts in roles.items():
        if role in look.labels and role not in look.found:
            look.found.add(role)
            for text in texts:
                if text.get_text():
                    text.set_text(look.labels[role])
    known = [text for text in look.texts if "\n" not in text]
    for key in look.labels:
        if key not in look.found:
            allowed = [*known[:MAX_TEXTS], *roles]
            raise InstrumentError(
                Problem("labels", "the figure has no such text", repr(key), allowed, similar_names(key, known))
            )


def _room(axes: Axes, others: Sequence[Axes]) -> tuple[float, float]:
    """Return the width of a text that is centered below or above a chart, and the height of one at its side, in pixels."""
    box, whole = axes.bbox, axes.get_figure(root=False).bbox  # type: ignore[union-attr]
    boxes = [other.bbox for other in others if other is not axes]
    return (
        _space(
            (box.x0, box.x1), (whole.x0, whole.x1), [(b.x0, b.x1) for b in boxes if b.y0 < box.y1 and box.y0 < b.y1]
        ),
        _space(
            (box.y0, box.y1), (whole.y0, whole.y1), [(b.y0, b.y1) for b in boxes if b.x0 < box.x1 and box.x0 < b.x1]
        ),
    )


def _space(own: tuple[float, float], whole: tuple[float, float], others: Sequence[tuple[float, float]]) -> float:
    """Return the length of the largest interval around the center that reaches neither the edges nor half the way to others."""
    middle = sum(own) / 2
    after = [(own[1] + low) / 2 for low, high in others if low + high > 2 * middle]
    before = [(own[0] + high) / 2 for low, high in others if low + high < 2 * middle]
    return 2 * min(min([whole[1], *after]) - middle, middle - max([whole[0], *before]))


def _wrap(text: Text, room: float) -> bool:
    """Break the lines of a text that are longer than the room, in pixels, and return whether there are any."""
    before = shown = text.get_text()
    box = text.get_window_extent()
    length = box.height if text.get_rotation() else box.width
    longest = max(map(len, shown.splitlines()), default=0)
    while longest > 8 and length > room - GAP:
        longest = min(longest - 1, int(longest * room / length))
        lines = [part for line in shown.splitlines() for part in wrap(line, max(8, longest)) or [""]]
        text.set_text("\n".join(lines))
        box = text.get_window_extent()
        length = box.height if text.get_rotation() else box.width
    return text.get_text() != before


def _labels(axis: Axis) -> Iterator[tuple[float, str, Bbox]]:
    """Return position, text and box of the visible labels of an axis, in ascending order of the boxes."""
    low, high = sorted(axis.get_view_interval())
    slack = 1e-6 * (high - low)
    pairs = zip(axis.get_majorticklocs(), axis.get_majorticklabels(), strict=False)
    for at, label in pairs:
        if low - slack <= at <= high + slack and label.get_visible() and label.get_text():
            yield (
                float(at),
                label.get_text(),
                label.get_window_extent().padded((GAP if label.get_rotation() else ACROSS) / 2, GAP / 2),
            )


def _turn(axis: Axis) -> None:
    """Make vertical labels horizontal if they have enough room."""
    labels = list(_labels(axis))
    if axis.get_tick_params().get("rotation") and labels:
        ends = sorted((box.x0 + box.x1) / 2 for *_, box in labels)
        gap = min((b - a for a, b in pairwise(ends)), default=axis.axes.bbox.width)
        if max(box.height for *_, box in labels) + GAP <= gap:
            axis.set_tick_params(rotation=0)


def _thin(axis: Axis) -> None:
    """Show every n-th label of an axis if its labels overlap, with the smallest possible n."""
    labels = list(_labels(axis))
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
