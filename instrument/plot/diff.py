"""Charts of two runs: their differences by layer and step, and a replay or counterfactual with the run that it repeats."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np
import pandas as pd

from ..analysis.load import Run, load
from ..comparison.result import Diff, place_cells, records
from ..config.schedule import STEP_PHASES
from ..errors import InstrumentError
from ..storage.run_search import NoRunError
from . import axes_and_scales as draw
from .look import ZERO, Look, current
from .plot_function import check_single_run, check_type, plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LARGEST = 2.0  # the largest relative difference of finite numbers; infinite ones are drawn as this
PROFILE, MAP = 3.4, 4.6  # widths of the two charts, in inches


@plot(interval="draws two runs, so there are no means over seeds")
def diff(difference: Diff, **look: Unpack[Look]) -> Figure:
    """Plot the differences between two runs: layers from top to bottom in the order of execution.

    The left chart has the largest relative difference of each layer: at the step of the first difference above the
    tolerance, or at all steps without one. The right chart has those of each step; it is missing for a single step.

    Args:
        difference: The result of `instrument.diff`.
        look: Width, labels, scale and axes of the figure; see `instrument.plot.Look`.

    Raises:
        InstrumentError: `difference` is not a result of `instrument.diff`.
    """
    if not isinstance(difference, Diff):
        required = "the result of instrument.diff(run_a, run_b)"
        raise InstrumentError(f"this plot requires {required}, but a {type(difference).__name__} was given")
    rows = records(difference.layers)
    cells = [place_cells({**row, "layer_b": row["layer"], "path_b": row["path"]}) for row in rows]
    names = [f"{layer}  {tensor.split(' ', 1)[1]}" for layer, tensor in cells]
    several_hooks = {name for name, count in Counter(names).items() if count > 1}
    hooks = [f" ({row['hook']})" if name in several_hooks else "" for name, row in zip(names, rows, strict=True)]
    names = [f"{name}{hook}" for name, hook in zip(names, hooks, strict=True)]
    values = np.fmin(difference.steps.to_numpy(np.float64), LARGEST)
    values[difference.steps.isna().to_numpy()] = np.nan
    several = values.shape[1] > 1
    height = draw.height_of(len(names))
    width = PROFILE + (MAP + 1.0) * several + draw.width_of(names)
    charts = draw.charts_beside(width, height + 1.2, 1 + several, width_ratios=[PROFILE, MAP][: 1 + several])
    _draw_profile(charts[0, 0], difference, names, values)
    if several:
        _draw_map(charts[-1, -1], difference, names if len(charts) > 1 else [], values, height)
    return draw.finished(charts)


def _draw_profile(axes: Axes, difference: Diff, names: list[str], values: np.ndarray) -> None:
    first, columns = difference.first, difference.steps.columns
    column = None if first is None else int(np.searchsorted(columns, first.step, side="right")) - 1
    shown = np.fmax.reduce(values, axis=1) if column is None else values[:, column]
    positive = shown[np.isfinite(shown) & (shown > 0)]
    tolerances = difference.layers["tolerance"].to_numpy(np.float64)
    low = min([*tolerances[tolerances > 0], *positive], default=1.0) / 3
    rows = np.arange(len(names)) + 0.5
    axes.plot(np.fmax(shown, low), rows, color=draw.colour_of(0))
    axes.plot(shown, rows, "o", markersize=3.5, color=draw.colour_of(0))
    if (equal := shown == 0.0).any():
        axes.plot(np.full(equal.sum(), low), rows[equal], "o", markersize=3.5, color=ZERO, label="equal")
    draw.scale(axes, "x", np.array([low, *positive]), is_log=current().scale != "linear")
    if difference.tolerance:
        edges = np.append(rows - 0.5, len(rows))
        steps = np.append(tolerances, tolerances[-1:])
        axes.step(steps, edges, where="pre", color=draw.colour_of(5), linestyle="--", label="tolerance")
    if first is not None and not difference.cause:
        axes.axhspan(first.location, first.location + 1, color=draw.colour_of(1), alpha=0.35, label="first difference")
    draw.label_locations(axes, names, middle=0.5)
    axes.grid(axis="x")
    axes.set_xlabel("relative difference")
    when = f"step {columns[column or 0]:,}" if len(columns) == 1 or column is not None else "largest of all steps"
    axes.set_title(when)


def _draw_map(axes: Axes, difference: Diff, names: list[str], values: np.ndarray, height: float) -> None:
    """Draw the difference of each layer and step; without names, the rows are those of the chart at the left."""
    axes.grid(False)
    positive = values[np.isfinite(values) & (values > 0)]
    if positive.size:
        look = {"norm": "log", "vmin": positive.min(), "vmax": max(positive.max(), 10 * positive.min())}
        look = draw.colours(values) if current().scale == "linear" else look
        cells = axes.pcolormesh(np.ma.masked_where(~(values > 0), values), **look)
        draw.colour_bar(axes, cells, "relative difference", height)
    if (values == 0.0).any():
        draw.draw_zeros(axes, values)
    if np.isnan(values).any():
        draw.add_hatch(axes, 0, values.shape[1], "not recorded by both runs")
    first = difference.first
    if first is not None and not difference.cause:
        column = int(np.searchsorted(difference.steps.columns, first.step, side="right")) - 1
        axes.plot(column + 0.5, first.location + 0.5, "o", markersize=7, fillstyle="none", color=draw.colour_of(5))
    axes.set_ylim(len(values), 0)
    axes.set_yticks([])
    if names:
        draw.label_locations(axes, names, middle=0.5)
    draw.label_steps(axes, [int(step) for step in difference.steps.columns])
    grouped = difference.common_steps[2] > len(difference.steps.columns)
    axes.set_xlabel(draw.plain("step (groups of steps: largest)" if grouped else "step", 60))
    axes.set_title("by step")


WIDTH, HEIGHT = 4.6, 3.2  # size of a chart, in inches
METRICS = {"loss": "loss", "grad_norm": "gradient norm"}
LEAST_MARGIN = 10  # steps of the run that are drawn before and after those of the replay


@plot(interval="draws two runs, so there are no means over seeds")
def replay(run: Run, *, source: str | Path | None = None, **look: Unpack[Look]) -> Figure:
    """Plot loss and gradient norm of a replay and of the run that it repeats, over the steps.

    The steps of the replay are shown, and some recorded ones before and after them. In a counterfactual, a vertical line
    marks the first step at which the interventions differ.

    Args:
        run: The replay, the folder of `python -m instrument.replay`.
        source: The folder of the run. Required if it was moved since the replay. Default: None, its recorded path.
        look: Width, labels, scale and axes of the figure; see `instrument.plot.Look`.

    Raises:
        InstrumentError: The run is not a replay or its source does not exist.
    """
    check_type(run, only_run=True)
    check_single_run([folder.name for folder in run.folders])
    entry = run.info.get("replay")
    if not entry:
        raise InstrumentError(f"{run.path} is not a replay: its run.json has no entry 'replay'")
    try:
        original = load(source or entry["source"])
    except NoRunError as error:
        raise InstrumentError(f"the run of this replay is missing: {error}; pass source=FOLDER") from None
    replayed, recorded = (_steps(each) for each in (run, original))
    margin = max(LEAST_MARGIN, len(replayed))
    first = replayed.index.min() - margin
    recorded = recorded[(recorded.index >= first) & (recorded.index <= replayed.index.max() + margin)]
    shown = [name for name in METRICS if replayed[name].notna().any() or recorded[name].notna().any()]
    count = max(1, len(shown))
    charts = draw.charts_beside(WIDTH * count + 0.6, draw.height_or(HEIGHT) + 0.7, count)
    label = "counterfactual" if entry["counterfactual"] else "replay"
    for axes, name in zip(charts.flat, shown, strict=False):
        draw.draw_line(axes, recorded[name], "run", draw.colour_of(0), "-")
        draw.draw_line(axes, replayed[name], label, draw.colour_of(5), "--")
        draw.scale(
            axes, "y", np.concatenate([recorded[name].to_numpy(np.float64), replayed[name].to_numpy(np.float64)])
        )
        if entry["counterfactual"]:
            where = draw.plain(f"from here on: {', '.join(entry['counterfactual'])}")
            axes.axvline(entry["first_step"], color="#555555", linewidth=0.8, linestyle=":", label=where)
        axes.set_title(METRICS[name])
        axes.set_xlabel("step")
        axes.grid(True)
    return draw.finished(charts)


def _steps(run: Run) -> pd.DataFrame:
    rows = run.read("metrics", ["step", "phase", "rank", *METRICS])
    return rows[rows["phase"].isin(STEP_PHASES) & (rows["rank"] == 0)].set_index("step")
