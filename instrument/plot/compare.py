"""The public function `compare`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import pandas as pd

from ..analysis.finite import finite_only
from ..analysis.load import Run
from ..analysis.plot_data import forward_order, matrices, row_locations, statistics_in
from ..analysis.series_selection import check_choice, select_location, select_series
from ..errors import InstrumentError
from ..spec.schedule import STEP_PHASES
from ..spec.statistics import STATISTICS, statistic_of
from ..spec.tables import MOMENT, TABLES
from .compare_drawing import Curves, draw_over_locations, draw_over_override, draw_over_steps
from .run_labels import combine_runs, overrides_of
from .source import REQUIRED_COLUMNS, check_columns, series_with
from .style import axis_name

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_FLOATS = [c for c in TABLES["metrics"].columns if c not in MOMENT and c.name != "skipped"]
METRICS = {c.name: f"{c.name} [{c.unit}]" if c.unit in ("fraction", "s", "1/s") else c.name for c in _FLOATS}
"""Axis labels of the numeric metrics, by name of the metric."""


def compare(
    runs: Run | Sequence[Run] | pd.DataFrame,
    y: str = "loss",
    x: str | None = None,
    *,
    layer: str | None = None,
    hook: str | None = None,
    kind: str | None = None,
    role: str | None = None,
    phase: str | None = None,
) -> Figure:
    """Compare a metric or a statistic of several runs.

    The horizontal axis depends on the arguments:

    - A metric, or a statistic with `layer`, is plotted over the steps.
    - A statistic without `layer` is plotted over the layers, at the last recorded step of each run.
    - With `x`, the last recorded value is plotted over an override: one point per run, and a line through the means of
      the runs that differ only in their seed.

    Args:
        runs: A `Run` that contains several runs, a list of runs, or rows of the metrics or stats table of several runs.
        y: A metric such as `loss` or `accuracy`, also a custom one, or a statistic such as `l2`.
        x: An override that differs between the runs, such as `hooks.tame.norm`.
        layer: The layer or parameter, for a statistic.
        hook: Name of the hook that recorded the statistic; required if several hooks did.
        kind: Kind of the hook, such as `forward`.
        role: Role of the tensor, such as `output`.
        phase: Phase of the rows. Default: `eval` if `x` is given and `y` is a metric of evaluations, otherwise that of
            steps: `train`, or `forward` for runs that do not train.

    Returns:
        The matplotlib figure.

    Raises:
        InstrumentError: No data matches the arguments, more than one series matches them, or matplotlib is not
            installed.
    """
    several = runs if isinstance(runs, pd.DataFrame) else combine_runs(runs)
    metrics, statistics = _choices(several)
    check_choice(y, [*metrics, *statistics], "y", "unknown metric or statistic")
    table = "metrics" if y in metrics else "stats"
    frame = _frame_of(several, table)
    custom = () if isinstance(several, pd.DataFrame) else several.custom_columns(table)
    overrides = overrides_of(frame.drop(columns=[*custom]), table)
    at = _override(x, overrides)
    wanted = {"hook": hook, "kind": kind, "role": role, "phase": phase}
    if table == "metrics":
        found = _metric(frame, y, phase or _usual_phase(frame, y, x))
    elif layer is not None:
        found = _at_layer(frame, y, layer, wanted)
    elif x is None:
        return draw_over_locations(*_over_locations(frame, y, forward_order(several), wanted), overrides)
    else:
        raise InstrumentError(f"plotting {y} over {x} requires layer=")
    return draw_over_steps(found, overrides) if at is None else draw_over_override(found, at, overrides)


def _choices(several: Run | pd.DataFrame) -> tuple[list[str], list[str]]:
    """Return the names of the metrics and of the statistics, with custom ones."""
    if not isinstance(several, pd.DataFrame):
        return [*METRICS, *several.custom_metrics], [*STATISTICS, *several.custom_statistics]
    custom = statistics_in(several)
    is_of_statistics = "layer" in several
    return [*METRICS, *([] if is_of_statistics else custom)], [*STATISTICS, *(custom if is_of_statistics else [])]


def _frame_of(several: Run | pd.DataFrame, table: str) -> pd.DataFrame:
    """Return the rows of all runs."""
    frame: pd.DataFrame = several if isinstance(several, pd.DataFrame) else getattr(several, table)
    check_columns(frame, table, ("run", "step", "phase") if table == "metrics" else ("run", *REQUIRED_COLUMNS))
    return frame


def _override(x: str | None, overrides: pd.DataFrame) -> str | None:
    """Return the column of an override; it is `override.<name>` if the table has a column of the same name."""
    if x is None:
        return None
    column = x if x in overrides else f"override.{x}"
    if column not in overrides:
        check_choice(x, [str(name) for name in overrides], "x", "the runs do not differ in this override")
    return column


def _usual_phase(metrics: pd.DataFrame, name: str, x: str | None) -> str:
    """Return the phase of a metric that is plotted by default."""
    phases = ["eval", *STEP_PHASES] if x else STEP_PHASES
    return next((phase for phase in phases if _has(metrics, name, phase)), "train")


def _has(metrics: pd.DataFrame, name: str, phase: str) -> bool:
    return name in metrics and bool(metrics.loc[metrics["phase"] == phase, name].notna().any())


def _metric(frame: pd.DataFrame, name: str, phase: str) -> Curves:
    """Return a metric of each run over the steps, as the mean over ranks."""
    check_choice(phase, list(frame["phase"]), "phase", "no metrics were recorded in this phase")
    rows = frame[frame["phase"] == phase]
    check_choice(
        name,
        [one for one in dict.fromkeys((*METRICS, name)) if _has(frame, one, phase)],
        "y",
        f"no run has a value of this metric in phase {phase}",
    )
    values = {str(run): part.groupby("step")[name].mean() for run, part in rows.groupby("run", sort=False)}
    return Curves(f"{name} ({phase})", METRICS.get(name, name), values)


def _at_layer(frame: pd.DataFrame, name: str, layer: str, wanted: dict[str, str | None]) -> Curves:
    """Return a statistic of one location of each run over the steps.

    Several calls in a step are merged by the rule of the statistic.
    """
    fitting = pd.concat([series.of(frame) for series in series_with(frame, name)])
    series, location, rows = select_location(fitting, layer, **wanted)
    merged = finite_only(rows).groupby(["run", "step"], sort=False)[name].agg(statistic_of(name).merged)
    values = {str(run): part.droplevel("run").sort_index() for run, part in merged.groupby("run", sort=False)}
    return Curves(f"{name} of {location} ({series.label})", axis_name(name), values)


def _over_locations(
    frame: pd.DataFrame, name: str, order: Sequence[str], wanted: dict[str, str | None]
) -> tuple[Curves, list[str]]:
    """Return a statistic of each run by location at its last recorded step, and all locations in forward order."""
    series = select_series(series_with(frame, name), **wanted)
    rows = series.of(frame)
    locations = list(row_locations(rows, order).cat.categories)
    values, steps = {}, set()
    for run, part in rows.groupby("run", sort=False):
        last = part[part["step"] == part["step"].max()]
        table = matrices(last, [name], order, 1)[name]
        values[str(run)] = pd.Series(table.values[:, 0], index=table.locations)
        steps.add(int(table.last[0]))
    when = f"{min(steps):,}" if len(steps) == 1 else f"{min(steps):,} to {max(steps):,}"
    return Curves(f"{name} of {series.label}, last recorded step ({when})", axis_name(name), values), locations
