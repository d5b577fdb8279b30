"""Heat map of the effect of an intervention at each layer and position, head or unit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..analysis.config_comparison import trainings
from ..analysis.load import Run
from ..analysis.plot_data import check_choice
from ..errors import InstrumentError, Problem
from ..plot.axes_and_scales import (
    NORMAL,
    add_hatch,
    add_legend,
    colour_bar,
    label_columns,
    label_locations,
    new_figure,
    plain,
    token_label,
    width_of,
    write_numbers,
)
from ..plot.compare import METRICS
from ..plot.run_labels import combine_runs
from ..plot.style import MAGNITUDE, SIGNED, axis_name
from ..tables.statistics import STATISTICS
from .intervention_grid import InterventionGrid, intervention_grid, metric_of, statistic_of_run

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST_LABEL = 24  # maximum number of characters of the label of a column
CELL, ROW = 0.42, 0.28  # size of a cell, in inches
NARROWEST, WIDEST = 3.0, 12.0  # limits of the width of the chart without labels, in inches


def patching(
    sweep: Run | Sequence[Run],
    metric: str = "loss",
    *,
    layer: str | None = None,
    hook: str | None = None,
    intervention: str | None = None,
    baseline: Run | None = None,
    tokens: Sequence[str] | Sequence[int] | None = None,
) -> Figure:
    """Plot the effect of an intervention over a sweep: a heat map of layers x positions, layers x heads, or other fields.

        python -m instrument -m +exp=mine 'hooks.patch.layers=blocks.0,blocks.1' 'hooks.patch.positions=[0],[1],[2]'

    The rows are the layers of the intervention. The columns are the other field in which the runs differ, such as
    `positions`, `heads.take`, `units` or `scale`. A cell is the metric of its run minus that of the baseline: the run without
    the intervention that has the same seed and is equal otherwise. Without any baseline, it is the metric itself. Runs that
    differ only in their seed share a cell, which has their mean.

    Args:
        sweep: The folder of a sweep, or a list of runs. A baseline in the same folder is found.
        metric: A metric such as `loss` or `accuracy`: that of the last evaluation, or of all batches of a run that does not
            train. Or a recorded statistic, also a custom one: its mean over the steps.
        layer: The layer of a statistic; required if several layers have it.
        hook: Name of the hook that recorded the statistic; required if several hooks did.
        intervention: Name of the intervention; required if the runs differ in several.
        baseline: A run without the intervention, if it is not one of the runs.
        tokens: Labels of the positions, if these are the columns: the tokens of the sample, as strings or ids.

    Returns:
        The matplotlib figure.

    Raises:
        InstrumentError: The finished runs do not differ in one or two fields of an intervention, no run has the metric, several
            locations have the statistic, or matplotlib is not installed. The message names the keys in which the runs differ.
    """
    runs = combine_runs(sweep)
    known = [*METRICS, *runs.custom_metrics, *STATISTICS, *runs.custom_statistics]
    check_choice(metric, known, "metric", "unknown metric or statistic")
    grid = intervention_grid(runs, intervention)
    number = _numbers(runs, metric, layer, hook)
    reference = None if baseline is None else _reference(baseline, grid, metric, layer, hook)
    values = grid.values(number, reference)
    if not np.isfinite(values).any():
        message = "no run and its baseline have a finite value" if grid.has_baseline else "no run has a finite value"
        raise InstrumentError(Problem("metric", message, metric))
    return _draw_figure(grid, values, metric, tokens, has_reference=reference is not None)


def _numbers(runs: Run, metric: str, layer: str | None, hook: str | None) -> Callable[[int], float]:
    """Return a function that returns the metric of a run, by the index of the run."""
    if metric in METRICS or metric in runs.custom_metrics:
        return lambda index: metric_of(runs, index, metric)
    return lambda index: statistic_of_run(runs, index, metric, layer="" if layer == "." else layer, hook=hook)


def _reference(baseline: Run, grid: InterventionGrid, metric: str, layer: str | None, hook: str | None) -> float:
    """Return the metric of the baseline of all runs."""
    if len(baseline.folders) > 1:
        message = f"the folder contains {len(baseline.folders)} runs"
        raise InstrumentError(Problem("baseline", message, str(baseline.path), fix="load one of them"))
    if any(grid.hook in training.interventions for training in trainings(baseline)[0]):
        message = f"this run has the intervention {grid.hook!r}, so it is not a baseline"
        raise InstrumentError(Problem("baseline", message, str(baseline.path), fix="pass a run without it"))
    return _numbers(baseline, metric, layer, hook)(0)


def _draw_figure(
    grid: InterventionGrid,
    values: np.ndarray,
    metric: str,
    tokens: Sequence[str] | Sequence[int] | None,
    *,
    has_reference: bool,
) -> Figure:
    is_difference = has_reference or grid.has_baseline
    rows, columns = values.shape
    labels = _column_labels(grid, tokens)
    width = float(np.clip(CELL * columns, NARROWEST, WIDEST))
    height = max(1.2, ROW * rows)
    figure = new_figure(width + width_of(grid.rows) + 1.6, height + 1.5)
    axes = figure.subplots()
    cells = axes.pcolormesh(np.ma.masked_invalid(values), **_colours(values, is_difference=is_difference))
    label_locations(axes, grid.rows, middle=0.5)
    label_columns(axes, labels, width)
    if not np.isfinite(values).all():
        add_hatch(axes, 0, columns, "no finished run" + (" with a baseline" if grid.has_baseline else ""))
    write_numbers(axes, values, cells, width)
    name = METRICS.get(metric) or axis_name(metric)
    colour_bar(axes, cells, f"{name} minus baseline" if is_difference else name, height)
    add_legend(figure)
    title = f"effect of {grid.hook} on {metric}" if is_difference else f"{metric} with {grid.hook}"
    axes.set_title(plain(title, 80), fontsize=10)
    axes.set_ylabel(plain(grid.row_key), fontsize=NORMAL)
    notes = _notes(grid, has_reference=has_reference)
    axes.set_xlabel("\n".join([plain(grid.column_key), *notes]).strip(), fontsize=NORMAL)
    return figure


def _column_labels(grid: InterventionGrid, tokens: Sequence[str] | Sequence[int] | None) -> list[str]:
    """Return the labels of the columns: tokens with their positions, or values."""
    if tokens is None:
        return [plain(text, LONGEST_LABEL) for text in grid.columns]
    names = [str(token) for token in np.asarray(tokens).tolist()]
    if not grid.column_key.endswith(".positions"):
        message = "tokens are labels of positions, which are not the columns of this sweep"
        raise InstrumentError(Problem("tokens", message, grid.column_key or "no columns"))
    labels = []
    for text in grid.columns:
        positions = [int(each) for each in text.split(", ")]
        outside = [each for each in positions if not -len(names) <= each < len(names)]
        if outside:
            message = f"there is no token at position {outside[0]}"
            raise InstrumentError(Problem("tokens", message, f"{len(names)} tokens"))
        labels.append(f"{token_label(' '.join(names[each] for each in positions))} ({text})")
    return labels


def _colours(values: np.ndarray, *, is_difference: bool) -> dict[str, Any]:
    """Return the color scale: centered at zero for differences, otherwise from the smallest to the largest value."""
    finite = values[np.isfinite(values)]
    if is_difference:
        largest = float(np.abs(finite).max()) or 1.0
        return {"cmap": SIGNED, "vmin": -largest, "vmax": largest}
    return {"cmap": MAGNITUDE, "vmin": float(finite.min()), "vmax": float(finite.max())}


def _notes(grid: InterventionGrid, *, has_reference: bool) -> list[str]:
    """Return notes on the runs of the cells."""
    is_matched = grid.has_baseline and not has_reference
    shown = [cell for cell in grid.cells if cell.baseline is not None or not is_matched]
    most = max(Counter((cell.row, cell.column) for cell in shown).values(), default=0)
    notes = [f"mean of {most} seeds"] if most > 1 else []
    if len(shown) < len(grid.cells):
        notes.append(f"{len(grid.cells) - len(shown)} runs are not shown: no baseline with the same seed")
    if grid.left_out:
        reasons = ", ".join(dict.fromkeys(grid.left_out.values()))
        notes.append(plain(f"{len(grid.left_out)} runs are not shown: {reasons}", 80))
    return notes
