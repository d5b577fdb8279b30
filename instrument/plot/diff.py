"""Chart of the differences between two runs: by layer, and by layer and step."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

from ..comparison.result import Diff, place_cells, records
from .axes_and_scales import (
    NORMAL,
    SMALL,
    add_hatch,
    add_legend,
    colour_bar,
    draw_zeros,
    height_of,
    label_locations,
    label_steps,
    new_figure,
    plain,
    width_of,
)
from .style import CATEGORIES, MAGNITUDE, ZERO

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LARGEST = 2.0  # the largest relative difference of finite numbers; infinite ones are drawn as this
PROFILE, MAP = 3.4, 4.6  # widths of the two charts, in inches


def diff(difference: Diff) -> Figure:
    """Plot the differences between two runs: layers from top to bottom in the order of execution.

    The left chart has the largest relative difference of each layer: at the step of the first difference above the
    tolerance, or at all steps without one. The right chart has those of each step; it is missing for a single step.

    Args:
        difference: The result of `instrument.diff`.

    Returns:
        The matplotlib figure.

    Raises:
        InstrumentError: matplotlib is not installed.
    """
    rows = records(difference.layers)
    cells = [place_cells({**row, "layer_b": row["layer"], "path_b": row["path"]}) for row in rows]
    names = [f"{layer}  {tensor.split(' ', 1)[1]}" for layer, tensor in cells]
    several_hooks = {name for name, count in Counter(names).items() if count > 1}
    hooks = [f" ({row['hook']})" if name in several_hooks else "" for name, row in zip(names, rows, strict=True)]
    names = [f"{name}{hook}" for name, hook in zip(names, hooks, strict=True)]
    values = np.fmin(difference.steps.to_numpy(np.float64), LARGEST)
    values[difference.steps.isna().to_numpy()] = np.nan
    several = values.shape[1] > 1
    height = height_of(len(names))
    figure = new_figure(PROFILE + (MAP + 1.0) * several + width_of(names), height + 1.2)
    charts = figure.subplots(1, 1 + several, squeeze=False, width_ratios=[PROFILE, MAP][: 1 + several])[0]
    _draw_profile(charts[0], difference, names, values)
    if several:
        _draw_map(charts[1], difference, values, height)
    add_legend(figure)
    return figure


def _draw_profile(axes: Axes, difference: Diff, names: list[str], values: np.ndarray) -> None:
    """Draw the difference of each layer, with the tolerance."""
    first, columns = difference.first, difference.steps.columns
    column = None if first is None else int(np.searchsorted(columns, first.step, side="right")) - 1
    shown = np.fmax.reduce(values, axis=1) if column is None else values[:, column]
    positive = shown[np.isfinite(shown) & (shown > 0)]
    tolerances = difference.layers["tolerance"].to_numpy(np.float64)
    low = min([*tolerances[tolerances > 0], *positive], default=1.0) / 3
    rows = np.arange(len(names)) + 0.5
    axes.plot(np.fmax(shown, low), rows, color=CATEGORIES[0], linewidth=0.8)
    axes.plot(shown, rows, "o", markersize=3.5, color=CATEGORIES[0])
    if (equal := shown == 0.0).any():
        axes.plot(np.full(equal.sum(), low), rows[equal], "o", markersize=3.5, color=ZERO, label="equal")
    axes.set_xscale("log")
    if difference.tolerance:
        edges = np.append(rows - 0.5, len(rows))
        steps = np.append(tolerances, tolerances[-1:])
        axes.step(steps, edges, where="pre", color=CATEGORIES[5], linewidth=1.0, linestyle="--", label="tolerance")
    if first is not None and not difference.cause:
        axes.axhspan(first.location, first.location + 1, color=CATEGORIES[1], alpha=0.35, label="first difference")
    label_locations(axes, names, middle=0.5)
    axes.tick_params(axis="x", labelsize=SMALL)
    axes.grid(axis="x", linewidth=0.3)
    axes.set_xlabel("relative difference", fontsize=NORMAL)
    when = f"step {columns[column or 0]:,}" if len(columns) == 1 or column is not None else "largest of all steps"
    axes.set_title(when, fontsize=NORMAL)


def _draw_map(axes: Axes, difference: Diff, values: np.ndarray, height: float) -> None:
    from matplotlib.colors import LogNorm

    positive = values[np.isfinite(values) & (values > 0)]
    if positive.size:
        norm = LogNorm(positive.min(), max(positive.max(), 10 * positive.min()))
        cells = axes.pcolormesh(np.ma.masked_where(~(values > 0), values), cmap=MAGNITUDE, norm=norm)
        colour_bar(axes, cells, "relative difference", height)
    if (values == 0.0).any():
        draw_zeros(axes, values)
    if np.isnan(values).any():
        add_hatch(axes, 0, values.shape[1], "not recorded by both runs")
    first = difference.first
    if first is not None and not difference.cause:
        column = int(np.searchsorted(difference.steps.columns, first.step, side="right")) - 1
        axes.plot(column + 0.5, first.location + 0.5, "o", markersize=7, fillstyle="none", color=CATEGORIES[5])
    axes.set_ylim(len(values), 0)
    axes.set_yticks([])
    label_steps(axes, [int(step) for step in difference.steps.columns], MAP)
    grouped = difference.common_steps[2] > len(difference.steps.columns)
    axes.set_xlabel(plain("step (groups of steps: largest)" if grouped else "step", 60), fontsize=NORMAL)
    axes.set_title("by step", fontsize=NORMAL)
