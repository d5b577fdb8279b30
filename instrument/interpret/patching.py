"""The effect of an intervention over a sweep: its runs as a grid of layers and positions, heads or another field, and the heat map."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import numpy as np
import pandas as pd

from ..analysis.config_comparison import HOOKS, RunSetup, differing_overrides, trainings
from ..analysis.config_fields import canonical_json, to_yaml
from ..analysis.config_key_effects import Means, averaged_columns, keys_of, means_of, student
from ..analysis.load import Run
from ..analysis.plot_data import check_choice
from ..analysis.run_history import METRICS
from ..analysis.run_tables import RunTables
from ..errors import InstrumentError, Problem, similar_names
from ..plot.axes_and_scales import colours, draw_cells, finished, new_charts, plain, token_label, width_of
from ..plot.compare import combine_runs
from ..plot.look import Look, axis_name, current
from ..plot.plot_function import plot
from ..tables.statistics import STATISTICS
from .attribution_result import Attribution

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LONGEST_LABEL = 24  # maximum number of characters of the label of a column
CELL, ROW = 0.42, 0.28  # size of a cell, in inches
NARROWEST, WIDEST = 3.0, 12.0  # limits of the width of the chart without labels, in inches


@plot()
def patching(
    sweep: Run | Sequence[Run] | Attribution,
    metric: str = "loss",
    *,
    layer: str | None = None,
    hook: str | None = None,
    intervention: str | None = None,
    baseline: Run | None = None,
    tokens: Sequence[str] | Sequence[int] | None = None,
    **look: Unpack[Look],
) -> Figure:
    """Plot the effect of an intervention over a sweep: a heat map of layers x positions, layers x heads, or other fields.

        python -m instrument -m +exp=mine 'hooks.patch.layers=blocks.0,blocks.1' 'hooks.patch.positions=[0],[1],[2]'

    The rows are the layers of the intervention. The columns are the other field in which the runs differ, such as
    `positions`, `heads.take`, `units` or `scale`. A cell is the metric of its run minus that of the baseline: the run without
    the intervention that has the same seed and is equal otherwise. Without any baseline, it is the metric itself. Runs that
    differ only in their seed share a cell, which has their mean, and for three seeds or more, or with `interval`, half the width
    of its Student's t interval.

    Args:
        sweep: The folder of a sweep, or a list of runs. A baseline in the same folder is found. Or the result of
            `instrument.interpret.attribute`, whose grid has the same rows and columns; only `tokens` applies to it.
        metric: A metric such as `loss` or `accuracy`: that of the last evaluation, or of all batches of a run that does not
            train. Or a recorded statistic, also a custom one: its mean over the steps.
        layer: The layer of a statistic; required if several layers have it.
        hook: Name of the hook that recorded the statistic; required if several hooks did.
        intervention: Name of the intervention; required if the runs differ in several.
        baseline: A run without the intervention, if it is not one of the runs.
        tokens: Labels of the positions, if these are the columns: the tokens of the sample, as strings or ids.
        look: Width, labels, scale, interval and axes of the figure; see `instrument.plot.Look`.

    Raises:
        InstrumentError: The finished runs do not differ in one or two fields of an intervention, no run has the metric, or
            several locations have the statistic. The message names the keys in which the runs differ.
    """
    if isinstance(sweep, Attribution):
        given = {"layer": layer, "hook": hook, "intervention": intervention, "baseline": baseline}
        for name in (name for name, value in given.items() if value is not None):
            raise InstrumentError(Problem(name, "does not apply to an attribution", given[name], fix="leave it out"))
        agreed = "" if sweep.exact is None else f", rank correlation with exact effects {sweep.rank_correlation():.2f}"
        title = f"{sweep.method.replace('_', ' ')} of {sweep.of}{agreed}"
        return _draw_figure(sweep.grid, tokens, title, f"contribution to {sweep.of}", "no such position")
    numbers, grid = _numbers_of(sweep, metric, intervention, baseline, layer=layer, hook=hook)
    name, is_difference = METRICS.get(metric) or axis_name(metric), baseline is not None or grid.has_baseline
    title = f"effect of {grid.hook} on {metric}" if is_difference else f"{metric} with {grid.hook}"
    label = f"{name} minus baseline" if is_difference else name
    missing = "no finished run" + (" with a baseline" if grid.has_baseline else "")
    notes = _notes(grid, has_reference=baseline is not None)
    widths = None
    if current().has_intervals(numbers.shape[-1]):
        means = numbers.mean(-1)
        squares = ((numbers - means[..., None]) ** 2).sum(-1).filled(np.nan)
        widths, _ = student(means.filled(np.nan), squares, numbers.count(-1), current().interval)
        notes[0] += f" ± half of its {100 * current().interval:g}% interval"
    table = _means(numbers, grid)
    return _draw_figure(table, tokens, title, label, missing, notes, widths=widths, is_difference=is_difference)


def patch_grid(sweep: Run | Sequence[Run], metric: str = "loss", **options: Any) -> pd.DataFrame:
    """Return the values of the heat map of `instrument.plot.patching`, which has the same arguments.

    Returns:
        float64: one row per layer, one column per position or value of another field, as in the `grid` of an `Attribution`.
    """
    return _means(*_numbers_of(sweep, metric, **options))


def _means(numbers: np.ma.MaskedArray, grid: InterventionGrid) -> pd.DataFrame:
    rows, columns = pd.Index(grid.rows, name=grid.row_key), pd.Index(grid.columns, name=grid.column_key)
    return pd.DataFrame(numbers.mean(-1).filled(np.nan), rows, columns)


def _numbers_of(
    sweep: Run | Sequence[Run], metric: str, intervention: str | None = None, baseline: Run | None = None, **where: Any
) -> tuple[np.ma.MaskedArray, InterventionGrid]:
    """Return the numbers of the runs [rows, columns, seeds], and their grid."""
    runs = combine_runs(sweep)
    known = [*METRICS, *runs.custom_metrics, *STATISTICS, *runs.custom_statistics]
    check_choice(metric, known, "metric", "unknown metric or statistic")
    grid = intervention_grid(runs, intervention)
    reference = None if baseline is None else _reference(baseline, grid, metric, **where)
    numbers = grid.numbers(_numbers(runs, metric, **where), reference)
    if not np.isfinite(numbers).any():
        message = "no run and its baseline have a finite value" if grid.has_baseline else "no run has a finite value"
        raise InstrumentError(Problem("metric", message, metric))
    return numbers, grid


def _numbers(runs: Run, metric: str, *, layer: str | None = None, hook: str | None = None) -> Callable[[int], float]:
    if metric in METRICS or metric in runs.custom_metrics:
        return lambda index: metric_of(runs, index, metric)
    return lambda index: statistic_of_run(runs, index, metric, layer="" if layer == "." else layer, hook=hook)


def _reference(baseline: Run, grid: InterventionGrid, metric: str, **where: Any) -> float:
    baseline.check_single("baseline")
    if any(grid.hook in training.interventions for training in trainings(baseline)[0]):
        message = f"this run has the intervention {grid.hook!r}, so it is not a baseline"
        raise InstrumentError(Problem("baseline", message, str(baseline.path), fix="pass a run without it"))
    return _numbers(baseline, metric, **where)(0)


def _draw_figure(
    grid: pd.DataFrame,
    tokens: Sequence[str] | Sequence[int] | None,
    title: str,
    label: str,
    missing: str,
    notes: Sequence[str] = (),
    *,
    widths: np.ndarray | None = None,
    is_difference: bool = True,
) -> Figure:
    values, rows = grid.to_numpy(), [*grid.index]
    row_name, column_name = map(str, (grid.index.name, grid.columns.name))
    height = max(1.2, (ROW if widths is None else 1.4 * ROW) * len(rows))
    width = float(np.clip(CELL * len(grid.columns), NARROWEST, WIDEST))
    charts = new_charts(width + width_of(rows) + 1.6, height + 1.5)
    axes = charts[0, 0]
    finite = values[np.isfinite(values)]
    largest = float(np.abs(finite).max()) or 1.0
    # Centered at zero for differences, otherwise from the smallest to the largest value.
    ends = (-largest, largest) if is_difference else (float(finite.min()), float(finite.max()))
    scale = colours(values, limits=ends) | ({} if is_difference else {"cmap": None})
    labels = _column_labels(grid, tokens)
    draw_cells(axes, values, rows, labels, height=height, label=label, missing=missing, widths=widths, **scale)
    xlabel = "\n".join([plain(column_name) if any(grid.columns) else "", *notes]).strip()
    return finished(charts, title, xlabel=xlabel, ylabel=plain(row_name))


def _column_labels(grid: pd.DataFrame, tokens: Sequence[str] | Sequence[int] | None) -> list[str]:
    """Return the labels of the columns: tokens with their positions, or values."""
    if tokens is None:
        empty = "all" if len(grid.columns) > 1 else ""
        return [plain(text, LONGEST_LABEL) or empty for text in grid.columns]
    names = [str(token) for token in np.asarray(tokens).tolist()]
    if not str(grid.columns.name).endswith("positions") or "" in grid.columns:
        message = "tokens are labels of positions, which are not the columns"
        raise InstrumentError(Problem("tokens", message, grid.columns.name or "no columns"))
    labels = []
    for text in grid.columns:
        positions = [int(each) for each in text.split(", ")]
        outside = [each for each in positions if not -len(names) <= each < len(names)]
        if outside:
            message = f"there is no token at position {outside[0]}"
            raise InstrumentError(Problem("tokens", message, f"{len(names)} tokens"))
        labels.append(f"{token_label(' '.join(names[each] for each in positions))} ({text})")
    return labels


def _notes(grid: InterventionGrid, *, has_reference: bool) -> list[str]:
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


LAYERS = "layers"
MAX_NAMES = 12  # maximum number of names in an error message


class Cell(NamedTuple):
    """A run with the intervention in the grid (`treated`), and the run without it that is equal otherwise, if any, by index."""

    row: int
    column: int
    treated: int
    baseline: int | None


@dataclass(frozen=True)
class InterventionGrid:
    """The finished runs of a sweep that differ in one or two fields of an intervention."""

    hook: str
    row_key: str  # the configuration key of the rows, such as `hooks.patch.layers`
    column_key: str  # that of the columns, such as `hooks.patch.positions`; empty if only one key differs
    rows: list[str]  # the value of each row as text; layers are in the order of their definition
    columns: list[str]  # the value of each column as text; indices are in ascending order, negative ones come last
    cells: list[Cell]
    left_out: dict[int, str]  # the reason for each run that is not in the grid, by index of the run

    @property
    def has_baseline(self) -> bool:
        """Whether any run has a baseline."""
        return any(cell.baseline is not None for cell in self.cells)

    def numbers(self, number: Callable[[int], float], baseline: float | None = None) -> np.ma.MaskedArray:
        """Return the numbers of the runs of each cell, given that of a run by its index: float64 [rows, columns, seeds].

        If there are baselines, these are differences: the number of each run minus that of its baseline, or of the `baseline` of
        all runs. Masked where a cell has fewer runs, or runs without a baseline if others have one.
        """
        number = cache(number)  # several runs have the same baseline
        cell_values: dict[tuple[int, int], list[float]] = {}
        for cell in self.cells:
            if baseline is None and self.has_baseline and cell.baseline is None:
                continue
            own = 0.0 if cell.baseline is None else number(cell.baseline)
            value = number(cell.treated) - (own if baseline is None else baseline)
            cell_values.setdefault((cell.row, cell.column), []).append(value)
        most = max(map(len, cell_values.values()), default=1)
        grid = np.ma.MaskedArray(np.full((len(self.rows), len(self.columns), most), np.nan), True)
        for at, numbers in cell_values.items():
            grid[*at, : len(numbers)] = numbers
        return grid


def intervention_grid(run: RunTables, intervention: str | None = None) -> InterventionGrid:
    """Arrange the runs of a sweep over an intervention, by default the only one whose fields differ, as a grid.

    Runs that differ only in their seed share a cell. Of runs that are equal, the last one counts. Raise an InstrumentError if no
    intervention or several differ between the runs, or more than two keys.
    """
    finished, left_out = trainings(run)
    names = dict.fromkeys(name for training in finished for name in training.interventions)
    fields = {name: _differing_fields(finished, name) for name in names}
    hook = _select(run, finished, left_out, {name: keys for name, keys in fields.items() if keys}, intervention)
    keys = sorted(fields[hook], key=lambda key: key != LAYERS)  # stable
    if len(keys) > 2:
        message = f"the runs differ in more than two fields of {hook!r}"
        given = ", ".join(f"{HOOKS}.{hook}.{key}" for key in keys)
        raise InstrumentError(Problem("sweep", message, given, fix=_FEWER))
    row, column = (keys[0], keys[1]) if len(keys) == 2 else (LAYERS, keys[0] if keys[0] != LAYERS else "")
    treated = [training for training in finished if hook in training.interventions]
    _check_unique(treated, hook, keys)
    values = [{each.index: canonical_json(_field(each, hook, key)) for each in treated} for key in (row, column)]
    rows, columns = (_ordered(run, texts.values()) for texts in values)
    controls = {training.identity: training.index for training in finished if hook not in training.interventions}
    cells = {}
    for training in treated:
        at = rows.index(values[0][training.index]), columns.index(values[1][training.index])
        cells[at, training.seed] = Cell(*at, training.index, controls.get(training.without([HOOKS, hook])))
    start = f"{HOOKS}.{hook}."
    of_rows, of_columns = ([_text(json.loads(value)) for value in each] for each in (rows, columns))
    column_key = column and start + column
    return InterventionGrid(hook, start + row, column_key, of_rows, of_columns, list(cells.values()), left_out)


_FEWER = "load the runs that differ in two of them, or pass a list of them"


def _differing_fields(finished: Sequence[RunSetup], hook: str) -> list[str]:
    """Return the fields of an intervention in which the runs that have it differ, such as `layers` and `heads.take`."""
    start = f"{HOOKS}.{hook}."
    fields = [
        {key.removeprefix(start): value for key, value in training.leaves.items() if key.startswith(start)}
        for training in finished
        if hook in training.interventions
    ]
    names = dict.fromkeys(name for each in fields for name in each)
    return [name for name in names if len({each.get(name) for each in fields}) > 1]


def _select(
    run: RunTables,
    finished: Sequence[RunSetup],
    left_out: Mapping[int, str],
    fields: Mapping[str, Sequence[str]],
    intervention: str | None,
) -> str:
    """Return the intervention whose fields differ."""
    swept = [f"{HOOKS}.{hook}.{key}" for hook, keys in fields.items() for key in keys]
    if intervention is not None and intervention not in fields:
        message = "the runs do not differ in any field of this intervention"
        near = similar_names(intervention, fields)
        raise InstrumentError(Problem("intervention", message, intervention, ", ".join(swept) or "none", near))
    if intervention is None and len(fields) > 1:
        fix = "pass " + " or ".join(f"intervention={name!r}" for name in fields)
        raise InstrumentError(Problem("sweep", "the runs differ in several interventions", ", ".join(swept), fix=fix))
    if not fields:
        overrides = ", ".join(differing_overrides(run)[:MAX_NAMES]) or "none"
        reasons = "; ".join(f"{count} left out: {reason}" for reason, count in Counter(left_out.values()).items())
        compared = f"{len(finished)} of {len(run.infos)} runs are compared" + (f"; {reasons}" if reasons else "")
        message = f"the runs do not differ in any field of an intervention ({compared})"
        fix = "sweep over it: -m 'hooks.patch.layers=blocks.0,blocks.1' 'hooks.patch.positions=[0],[1]'"
        raise InstrumentError(Problem("sweep", message, f"overrides that differ: {overrides}", fix=fix))
    return intervention or next(iter(fields))


def _check_unique(treated: Sequence[RunSetup], hook: str, keys: Sequence[str]) -> None:
    """Check that runs in the same cell differ only in their seed."""
    start = f"{HOOKS}.{hook}."
    others: dict[tuple[str | None, ...], dict[str, str]] = {}
    for training in treated:
        leaves = dict(training.leaves)
        first = others.setdefault(tuple(leaves.pop(start + key, None) for key in keys), leaves)
        if first != leaves:
            names = [key for key in dict.fromkeys([*first, *leaves]) if first.get(key) != leaves.get(key)]
            message = f"runs with equal {' and '.join(start + key for key in keys)} also differ in other keys"
            raise InstrumentError(Problem("sweep", message, ", ".join(names[:MAX_NAMES]), fix=_FEWER))


def _field(training: RunSetup, hook: str, field: str) -> Any:
    return training.at([HOOKS, hook, *field.split(".")]) if field else None


def _ordered(run: RunTables, values: Iterable[str]) -> list[str]:
    """Return the different values, which are JSON: layers in their order, indices in ascending order, others as they come."""
    layers = {name or ".": rank for rank, name in enumerate(run.single(0).read("layers", ["layer"])["layer"])}

    def order(text: str) -> tuple[Any, ...]:
        value = json.loads(text)
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, str) and first in layers:
            return (0, layers[first])
        if isinstance(first, int | float):
            return (1, first < 0, value if isinstance(value, list) else [value])
        return (2,)

    return sorted(dict.fromkeys(values), key=order)


def _text(value: Any) -> str:
    """Return a value as a label: `blocks.0` for a list with one layer."""
    if value is None:
        return ""
    values = value if isinstance(value, list) else [value]
    return ", ".join(each if isinstance(each, str) else to_yaml(each) for each in values)


def metric_of(run: RunTables, index: int, metric: str) -> float:
    """Return a metric of one of several runs: that of the last evaluation or of all batches, otherwise its mean over the steps."""
    if (value := run.infos[index]["metrics"].get(metric)) is not None:
        return float(value)
    means = means_of(run.single(index), "metrics")
    return _mean(means, metric, range(len(means.locations)))


def statistic_of_run(run: RunTables, index: int, statistic: str, **where: str | None) -> float:
    """Return the mean of a statistic over the steps of one of several runs, at the only location that matches `where`."""
    one = run.single(index)
    if statistic not in averaged_columns(one, "stats"):
        return float("nan")
    means, columns = means_of(one, "stats"), keys_of("stats")
    at = means.columns.index(statistic)
    known = [i for i in range(len(means.locations)) if means.counts[i, at]]
    wanted = {columns.index(name): value for name, value in where.items() if value is not None}
    matches = [i for i in known if all(means.locations[i][column] == value for column, value in wanted.items())]
    if len(matches) != 1:
        located = (zip(columns, means.locations[i], strict=True) for i in matches or known)
        shown = [", ".join(f"{key}={cell!r}" for key, cell in cells if cell) for cells in located]
        message = f"{'several locations have' if matches else 'no location has'} this statistic; select one with layer= and hook="
        raise InstrumentError("\n    ".join([str(Problem("metric", message, statistic)), *shown[:MAX_NAMES]]))
    return _mean(means, statistic, matches)


def _mean(means: Means, name: str, rows: Sequence[int]) -> float:
    at = means.columns.index(name) if name in means.columns else None
    numbers = [float(means.values[i, at]) for i in rows if at is not None and means.counts[i, at]]
    return float(np.mean(numbers)) if numbers else float("nan")
