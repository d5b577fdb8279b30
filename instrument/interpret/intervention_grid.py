"""The runs of a sweep over an intervention, as a grid: layers as rows, and positions, heads or another field as columns."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from ..analysis.config_comparison import HOOKS, Training, differing_overrides, trainings
from ..analysis.config_fields import canonical_json, to_yaml
from ..analysis.means_over_steps import Means, averaged_columns, keys_of, means_of
from ..analysis.run_tables import RunTables
from ..errors import InstrumentError, Problem, similar_names

LAYERS = "layers"
MAX_NAMES = 12  # maximum number of names in an error message


@dataclass(frozen=True)
class Cell:
    """A run in the grid.

    Attributes:
        treated: Index of the run with the intervention.
        baseline: Index of the run without it that has the same seed and is equal otherwise; None without such a run.
    """

    row: int
    column: int
    treated: int
    baseline: int | None


@dataclass(frozen=True)
class InterventionGrid:
    """The finished runs of a sweep that differ in one or two fields of an intervention.

    Attributes:
        row_key: The configuration key of the rows, such as `hooks.patch.layers`.
        column_key: The configuration key of the columns, such as `hooks.patch.positions`; empty if only one key differs.
        rows: The value of each row as text. Layers are in the order of their definition.
        columns: The value of each column as text. Indices are in ascending order; negative ones come last.
        left_out: The reason for each run that is not in the grid, by index of the run.
    """

    hook: str
    row_key: str
    column_key: str
    rows: list[str]
    columns: list[str]
    cells: list[Cell]
    left_out: dict[int, str]

    @property
    def has_baseline(self) -> bool:
        """Whether any run has a baseline."""
        return any(cell.baseline is not None for cell in self.cells)

    def values(self, number: Callable[[int], float], baseline: float | None = None) -> np.ndarray:
        """Return the mean number of each cell over its runs.

        If there are baselines, these are differences: the number of each run minus that of its baseline. Runs without a baseline
        do not count then.

        Args:
            number: Returns the number of a run, by the index of the run.
            baseline: The number of the baseline of all runs. Default: that of the baseline of each run.

        Returns:
            float64, shape [rows, columns]; NaN for cells without a run, or without a baseline if others have one.
        """
        number = cache(number)  # several runs have the same baseline
        cell_values: dict[tuple[int, int], list[float]] = {}
        for cell in self.cells:
            if baseline is None and self.has_baseline and cell.baseline is None:
                continue
            value = number(cell.treated)
            if baseline is not None:
                value -= baseline
            elif cell.baseline is not None:
                value -= number(cell.baseline)
            cell_values.setdefault((cell.row, cell.column), []).append(value)
        grid = np.full((len(self.rows), len(self.columns)), np.nan)
        for at, numbers in cell_values.items():
            grid[at] = np.mean(numbers)
        return grid


def intervention_grid(run: RunTables, intervention: str | None = None) -> InterventionGrid:
    """Arrange the runs of a sweep over an intervention as a grid.

    Runs that differ only in their seed share a cell. Of runs that are equal, the last one counts.

    Args:
        intervention: Name of the intervention. Default: the only one whose fields differ.

    Raises:
        InstrumentError: No intervention or several differ between the runs, or they differ in more than two keys.
    """
    finished, left_out = trainings(run)
    fields = {name: _differing_fields(finished, name) for name in _interventions(finished)}
    hook = _select(run, finished, left_out, {name: keys for name, keys in fields.items() if keys}, intervention)
    keys = sorted(fields[hook], key=lambda key: key != LAYERS)  # stable
    if len(keys) > 2:
        names = [f"{HOOKS}.{hook}.{key}" for key in keys]
        message = f"the runs differ in more than two fields of {hook!r}"
        raise InstrumentError(Problem("sweep", message, ", ".join(names), fix=_FEWER))
    row, column = (keys[0], keys[1]) if len(keys) == 2 else (LAYERS, keys[0] if keys[0] != LAYERS else "")
    treated = [training for training in finished if hook in training.interventions]
    _check_unique(treated, hook, keys)
    row_values = {training.index: _field(training, hook, row) for training in treated}
    column_values = {training.index: _field(training, hook, column) for training in treated}
    rows, columns = _ordered(run, row_values.values()), _ordered(run, column_values.values())
    controls = {training.identity: training.index for training in finished if hook not in training.interventions}
    cells = {}
    for training in treated:
        at = (
            rows.index(canonical_json(row_values[training.index])),
            columns.index(canonical_json(column_values[training.index])),
        )
        cells[(*at, training.seed)] = Cell(*at, training.index, controls.get(training.without([HOOKS, hook])))
    start = f"{HOOKS}.{hook}."
    return InterventionGrid(
        hook,
        start + row,
        column and start + column,
        [_text(json.loads(value)) for value in rows],
        [_text(json.loads(value)) for value in columns],
        list(cells.values()),
        left_out,
    )


_FEWER = "load the runs that differ in two of them, or pass a list of them"


def _interventions(finished: Sequence[Training]) -> list[str]:
    return list(dict.fromkeys(name for training in finished for name in training.interventions))


def _differing_fields(finished: Sequence[Training], hook: str) -> list[str]:
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
    finished: Sequence[Training],
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
        message = "the runs differ in several interventions"
        raise InstrumentError(Problem("sweep", message, ", ".join(swept), fix=fix))
    if not fields:
        overrides = ", ".join(differing_overrides(run)[:MAX_NAMES]) or "none"
        reasons = "; ".join(f"{count} left out: {reason}" for reason, count in Counter(left_out.values()).items())
        compared = f"{len(finished)} of {len(run.infos)} runs are compared" + (f"; {reasons}" if reasons else "")
        message = f"the runs do not differ in any field of an intervention ({compared})"
        fix = "sweep over it: -m 'hooks.patch.layers=blocks.0,blocks.1' 'hooks.patch.positions=[0],[1]'"
        raise InstrumentError(Problem("sweep", message, f"overrides that differ: {overrides}", fix=fix))
    return intervention or next(iter(fields))


def _check_unique(treated: Sequence[Training], hook: str, keys: Sequence[str]) -> None:
    """Check that runs in the same cell differ only in their seed."""
    start = f"{HOOKS}.{hook}."
    others: dict[tuple[str | None, ...], dict[str, str]] = {}
    for training in treated:
        leaves = dict(training.leaves)
        at = tuple(leaves.pop(start + key, None) for key in keys)
        first = others.setdefault(at, leaves)
        if first != leaves:
            names = [key for key in dict.fromkeys([*first, *leaves]) if first.get(key) != leaves.get(key)]
            message = f"runs with equal {' and '.join(start + key for key in keys)} also differ in other keys"
            raise InstrumentError(Problem("sweep", message, ", ".join(names[:MAX_NAMES]), fix=_FEWER))


def _field(training: Training, hook: str, field: str) -> Any:
    """Return the value of a field of an intervention; None without a field."""
    return training.at([HOOKS, hook, *field.split(".")]) if field else None


def _ordered(run: RunTables, values: Any) -> list[str]:
    """Return the different values as JSON: layers in their order, indices in ascending order, others as they come."""
    unique = list(dict.fromkeys(map(canonical_json, values)))
    layers = {name or ".": rank for rank, name in enumerate(run.single(0).read("layers", ["layer"])["layer"])}

    def order(text: str) -> tuple[Any, ...]:
        value = json.loads(text)
        first = value[0] if isinstance(value, list) and value else value
        if isinstance(first, str) and first in layers:
            return (0, layers[first])
        if isinstance(first, int | float):
            return (1, first < 0, value if isinstance(value, list) else [value])
        return (2,)

    return sorted(unique, key=order)


def _text(value: Any) -> str:
    """Return a value as a label: `blocks.0` for a list with one layer."""
    if value is None:
        return ""
    values = value if isinstance(value, list) else [value]
    return ", ".join(each if isinstance(each, str) else to_yaml(each) for each in values)


# ------------------------------------------------------------------------------------------------ numbers


def metric_of(run: RunTables, index: int, metric: str) -> float:
    """Return a metric of one of several runs: that of the last evaluation or of all batches, otherwise its mean over the steps."""
    value = run.infos[index]["metrics"].get(metric)
    if value is not None:
        return float(value)
    means = means_of(run.single(index), "metrics")
    if metric not in means.columns:
        return float("nan")
    return _mean(means, metric, range(len(means.locations)))


def statistic_of_run(run: RunTables, index: int, statistic: str, **where: str | None) -> float:
    """Return the mean of a statistic over the steps of one of several runs.

    Args:
        where: Conditions on `layer`, `hook` and other columns that identify a location; None for any.

    Raises:
        InstrumentError: No location or several match.
    """
    one = run.single(index)
    if statistic not in averaged_columns(one, "stats"):
        return float("nan")
    means, columns = means_of(one, "stats"), keys_of("stats")
    at = means.columns.index(statistic)
    known = [i for i in range(len(means.locations)) if means.counts[i, at]]
    wanted = {columns.index(name): value for name, value in where.items() if value is not None}
    matches = [i for i in known if all(means.locations[i][column] == value for column, value in wanted.items())]
    if len(matches) != 1:
        shown = [
            ", ".join(f"{key}={cell!r}" for key, cell in zip(columns, means.locations[i], strict=True) if cell)
            for i in matches or known
        ]
        message = f"{'several locations have' if matches else 'no location has'} this statistic; select one with layer= and hook="
        raise InstrumentError("\n    ".join([str(Problem("metric", message, statistic)), *shown[:MAX_NAMES]]))
    return _mean(means, statistic, matches)


def _mean(means: Means, name: str, rows: Sequence[int]) -> float:
    at = means.columns.index(name)
    numbers = [float(means.values[i, at]) for i in rows if means.counts[i, at]]
    return float(np.mean(numbers)) if numbers else float("nan")
