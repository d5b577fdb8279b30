"""Drawing functions of `compare`."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Literal

import numpy as np
import pandas as pd

from .axes_and_scales import (
    LETTER,
    SMALL,
    add_legend,
    draw_line,
    height_of,
    label_locations,
    needs_log_scale,
    new_figure,
    plain,
    scale,
    width_of,
)
from .run_labels import LONG, is_missing, labels_of, overrides_text, value_text
from .style import CATEGORIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from .figure import Picture

WIDTH, HEIGHT = 5.5, 3.6  # size of a chart, in inches
LINE = 0.17  # height of a legend entry, in inches
SEED = "seed"
DASHES = ("-", "--", ":", "-.")
FEW_VALUES = 8  # maximum number of values that all get a tick


@dataclass(frozen=True)
class Curves:
    """One line per run.

    Attributes:
        title: Title of the chart.
        axis: Label of the value axis.
        values: The values of each run, indexed by step or location; NaN if a value is not finite.
    """

    title: str
    axis: str
    values: dict[str, pd.Series]


def draw_over_steps(curves: Curves, overrides: pd.DataFrame) -> Figure:
    """Draw one line per run over the steps."""
    labels = labels_of(overrides)
    figure = _figure(labels, HEIGHT, 0.0)
    axes = figure.subplots()
    for run, (colour, dashes) in _styles(overrides).items():
        if run in curves.values:
            draw_line(axes, curves.values[run], plain(labels[run], LONG), colour, dashes)
    _scale(axes, "y", curves)
    _set_titles(axes, curves.title, "step", curves.axis)
    add_legend(figure, beside=True)
    return figure


def draw_over_locations(curves: Curves, locations: list[str], overrides: pd.DataFrame) -> Figure:
    """Draw one line per run over the locations, from top to bottom."""
    labels = labels_of(overrides)
    figure = _figure(labels, height_of(len(locations)), width_of(locations))
    axes = figure.subplots()
    for run, (colour, dashes) in _styles(overrides).items():
        if run in curves.values:
            line = curves.values[run].reindex(locations).to_numpy()
            label = plain(labels[run], LONG)
            axes.plot(
                line, range(len(locations)), color=colour, linestyle=dashes, marker=".", linewidth=1.0, label=label
            )
    _scale(axes, "x", curves)
    label_locations(axes, locations)
    _set_titles(axes, curves.title, curves.axis, "in forward order")
    add_legend(figure, beside=True)
    return figure


def draw_over_override(curves: Curves, x: str, overrides: pd.DataFrame) -> Figure:
    """Draw the last value of each run as a point, and a line through the means of runs with different seeds."""
    finals = {run: float(line.iloc[-1]) for run, line in curves.values.items()}
    alike = _labels_without_seed(overrides.drop(columns=x))
    labels = {label: label or "mean" for label in alike.values()}
    at, names = _positions(overrides[x])
    figure = _figure(labels, HEIGHT, 0.0)
    axes = figure.subplots()
    for (group, label), colour in zip(labels.items(), cycle(CATEGORIES), strict=False):
        runs = [run for run in finals if alike[run] == group]
        points = pd.Series([finals[run] for run in runs], index=[at[run] for run in runs], dtype=float)
        means = points[np.isfinite(points)].groupby(level=0).mean()
        axes.plot(points.index, points.to_numpy(), "o", color=colour, markersize=5, alpha=0.6)
        axes.plot(means.index, means.to_numpy(), "-", color=colour, linewidth=1.5, label=plain(label, LONG), marker="_")
    lost = [at[run] for run, value in finals.items() if not np.isfinite(value)]
    if lost:
        top = axes.get_xaxis_transform()
        axes.plot(lost, [0.97] * len(lost), "x", color="black", transform=top, label="not finite at the end")
    final_values = np.array(list(finals.values()))
    scale(axes, "y", final_values, is_log=needs_log_scale(final_values))
    _label_values(axes, at, names)
    over = f"{plain(x)}\npoints: runs; lines: means over runs"
    _set_titles(axes, f"{curves.title}, last recorded", over, curves.axis)
    add_legend(figure, beside=True)
    return figure


def _positions(values: pd.Series) -> tuple[dict[str, float], list[str]]:
    """Return the position of each run on the axis of an override, and tick labels if the values are not numbers."""
    cells = {str(run): value for run, value in values.items()}
    if all(_is_number(cell) for cell in cells.values()):
        return {run: float(cell) for run, cell in cells.items()}, []
    words = {run: "not set" if is_missing(cell) else value_text(cell) for run, cell in cells.items()}
    names = list(dict.fromkeys(words.values()))
    return {run: float(names.index(word)) for run, word in words.items()}, names


def _is_number(cell: object) -> bool:
    return isinstance(cell, int | float) and not isinstance(cell, bool) and math.isfinite(cell)


def _label_values(axes: Axes, at: dict[str, float], names: list[str]) -> None:
    """Set up the horizontal axis of an override: logarithmic for a wide range, one tick per value for few values."""
    values = np.unique(list(at.values()))
    scale(axes, "x", values, is_log=not names and needs_log_scale(values))
    if names or len(values) <= FEW_VALUES:
        axes.set_xticks(values, [plain(name, 16) for name in names or map(value_text, values)])
        axes.minorticks_off()


def _labels_without_seed(overrides: pd.DataFrame) -> dict[str, str]:
    """Return the overrides of each run without the seed, as text."""
    return {str(run): overrides_text(row) for run, row in overrides.drop(columns=SEED, errors="ignore").iterrows()}


def _styles(overrides: pd.DataFrame) -> dict[str, tuple[str, str]]:
    """Return a color and a line style for each run; runs that differ only in their seed have the same color."""
    alike = _labels_without_seed(overrides)
    distinct = len(set(alike.values())) > 1
    colours = dict(zip(dict.fromkeys(alike.values()) if distinct else alike, cycle(CATEGORIES), strict=False))
    seen: Counter[str] = Counter()
    looks = {}
    for run, label in alike.items():
        key = label if distinct else run
        looks[run] = (colours[key], DASHES[seen[key] % len(DASHES)])
        seen[key] += 1
    return looks


def _scale(axes: Axes, name: Literal["x", "y"], curves: Curves) -> None:
    """Choose a linear or logarithmic value axis."""
    values = np.concatenate([line.to_numpy(np.float64) for line in curves.values.values()])
    scale(axes, name, values, is_log=needs_log_scale(values))


def _figure(labels: dict[str, str], height: float, left: float) -> Picture:
    """Create a figure with room for labels at the left and a legend at the right."""
    letters = max((min(len(label), LONG) for label in labels.values()), default=0)
    return new_figure(left + WIDTH + 1.0 + LETTER * letters, max(height, LINE * len(labels)) + 1.0)


def _set_titles(axes: Axes, title: str, x: str, y: str) -> None:
    """Set the titles and the grid."""
    axes.set_title(plain(title, 80), fontsize=10)
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(alpha=0.3)
    axes.tick_params(labelsize=SMALL)
