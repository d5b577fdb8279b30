"""The metrics, the layers that changed most and the coverage of a run as rows of text, in the terminal and in a report; as HTML, in a
notebook. The tables are those of pandas, which a notebook formats.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ..config.schedule import STEP_PHASES
from ..formatting import format_number, shorten
from ..rules.step_rows import location_name
from ..tables.schemas import TABLES
from .findings import findings
from .plot_data import RecordedSeries, short_names
from .run_history import METRICS, RunHistory, history_of
from .run_tables import RunTables
from .step_history import StepHistory

LEVELS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "!"
MISSING = "\N{NO-BREAK SPACE}"  # HTML merges other spaces
SPARKLINE_WIDTH = 24
WIDE = 100.0  # ratio of the largest to the smallest value from which an axis is logarithmic
LONGEST = 40  # maximum length of the name of a location, in characters
ROUNDING = 1e-9  # relative difference up to which values are shown as equal
SHOWN_METRICS = [name for name in METRICS if name != "seconds"]
MAX_PLACES = 6  # maximum number of locations listed for a hook that did not fire
METRIC_COLUMNS = ("metric", "over the steps", "last")
LAYER_COLUMNS = ("hook", "layer", "statistic", "over the steps", "last", "last/median")
MAX_RUNS = 50  # maximum number of runs of a sweep that are shown
MAX_ROWS = 15  # maximum number of rows of any other table
MAX_STATS = 500_000  # maximum number of rows of statistics that are read, which takes a few seconds
HOOK_COLUMNS = ("hook", "kind", "locations", "fired", "expected")


class Cells(NamedTuple):
    """A row of a table, and whether it shows a value that is not finite."""

    cells: tuple[str, ...]
    is_problem: bool


class LocationView(NamedTuple):
    """The most useful statistic of a location."""

    series: RecordedSeries
    location: str
    statistic: str
    values: np.ndarray  # over the groups of steps; NaN for a missing value
    not_finite: np.ndarray  # whether a group contains NaN or infinite elements
    last: float  # at the last step; NaN if the tensor is not finite there
    ratio: float  # of the last value to the median over the steps; NaN if it is undefined

    @property
    def urgency(self) -> tuple[bool, float]:
        """The sort key: locations with non-finite elements first, then those whose last value differs most."""
        change = 0.0 if np.isnan(self.ratio) else np.inf if self.ratio == 0 else abs(np.log(self.ratio))
        return not self.not_finite.any(), -change


def metric_rows(history: RunHistory) -> list[Cells]:
    """Return one row per metric, with `METRIC_COLUMNS`."""
    rows = []
    for phase, metrics in history.metrics.items():
        for name in (*SHOWN_METRICS, *(name for name in metrics.statistics if name not in METRICS)):
            if name not in metrics.statistics or (phase not in STEP_PHASES and name == "samples_per_second"):
                continue
            line = sparkline(metrics.values(name, metrics.groups())[0])
            rows.append(Cells((_in_phase(name, phase), line, format_number(history.last_metric(phase, name))), False))
    for (phase, name), steps in history.not_finite.items():
        rows.append(Cells((_in_phase(name, phase), f"first not finite at step {min(steps):,}", ""), True))
    return rows


def _in_phase(name: str, phase: str) -> str:
    return name if phase in STEP_PHASES else f"{phase} {name}"


def layer_rows(history: RunHistory, most: int | None = None) -> tuple[list[Cells], int]:
    """Return up to `most` rows of locations with `LAYER_COLUMNS`, the largest changes first, and the number of all locations."""
    views = [view for series, each in history.series.items() for view in views_of(series, each)]
    shown = sorted(views, key=lambda view: view.urgency)[:most]
    names = short_names([view.location for view in shown], LONGEST)
    rows = []
    for view in shown:
        hook = view.series.hook + ("" if view.series.phase in STEP_PHASES else f" ({view.series.phase})")
        ratio = "" if np.isnan(view.ratio) else f"{view.ratio:.3g}"
        line, last = sparkline(view.values, view.not_finite), "" if np.isnan(view.last) else format_number(view.last)
        cells = (hook, names[view.location], view.statistic, line, last, ratio)
        rows.append(Cells(cells, bool(view.not_finite.any())))
    return rows, len(views)


def views_of(series: RecordedSeries, history: StepHistory) -> Iterator[LocationView]:
    """Yield the most useful statistic of each location of a series."""
    names = history.statistics
    if not names:
        return
    statistic = series.shown_first(names)
    groups = history.groups()
    values, last = history.values(statistic, groups), history.last(statistic)
    bad = np.zeros(values.shape, bool)
    for name in series.problem_counts:
        if name in names:
            bad |= history.values(name, groups) > 0
            last = np.where(history.last_steps(statistic) < history.last_steps(name), np.nan, last)
    for row, location in enumerate(history.locations):
        known = np.abs(values[row][~np.isnan(values[row])])
        median = float(np.median(known)) if len(known) else 0.0
        ratio = abs(float(last[row])) / median if median else float("nan")
        yield LocationView(series, location, statistic, values[row], bad[row], float(last[row]), ratio)


def sparkline(values: np.ndarray, not_finite: np.ndarray | None = None) -> str:
    """Return numbers as a line of up to 24 small bars. Several numbers share one: their mean is shown.

    `values` [n]: NaN for missing ones. `not_finite`, bool [n]: which are marked as such.
    """
    bad = np.zeros(len(values), bool) if not_finite is None else not_finite
    pieces = np.array_split(np.arange(len(values)), min(SPARKLINE_WIDTH, max(1, len(values))))
    known = [values[piece][~np.isnan(values[piece])] for piece in pieces]
    means = np.array([piece.mean() if len(piece) else np.nan for piece in known])
    finite = means[np.isfinite(means)]
    if len(finite) and finite.min() > 0 and finite.max() / finite.min() > WIDE:
        means, finite = np.log(np.where(means > 0, means, np.nan)), np.log(finite)
    low, high = (finite.min(), finite.max()) if len(finite) else (0.0, 0.0)
    is_constant = high - low <= ROUNDING * max(abs(low), abs(high))
    marks = []
    for mean, piece in zip(means, pieces, strict=True):
        if bad[piece].any() or np.isinf(mean):
            marks.append(NOT_FINITE)
        elif np.isnan(mean):
            marks.append(MISSING)
        else:
            level = 0.5 if is_constant else (mean - low) / (high - low)
            marks.append(LEVELS[min(len(LEVELS) - 1, int(level * len(LEVELS)))])
    return "".join(marks)


def coverage_rows(coverage: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return one row per hook: expected and actual firings over all ranks, and reasons for missing firings."""
    hooks: dict[str, list[Mapping[str, Any]]] = {}
    for site in coverage:
        hooks.setdefault(site["hook"], []).append(site)
    rows = []
    for hook, sites in hooks.items():
        causes: dict[str, list[str]] = {}
        for site in sites:
            if site["cause"] and (site["fired"] < site["expected"] or not site["expected"]):
                causes.setdefault(site["cause"], []).append(location_name(site["layer"], site["path"], site["kind"]))
        rows.append(
            {
                "hook": hook,
                "kind": sites[0]["kind"],
                "role": sites[0]["role"],
                "locations": len({(site["layer"], site["path"]) for site in sites}),
                "expected": sum(site["expected"] for site in sites),
                "fired": sum(site["fired"] for site in sites),
                "causes": [(cause, shorten([*dict.fromkeys(places)], MAX_PLACES)) for cause, places in causes.items()],
            }
        )
    return rows


def to_html(run: RunTables, name: str = "run", coverage: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Return the HTML; large tables are not held in memory. `name`: the Python expression of the run in the examples.

    `coverage`: that so far of a run in progress. Default: that of the run, whose table is written at its end.
    """
    parts = [*(_sections_of_run(run, name, coverage) if run.folders == [run.path] else _sections_of_sweep(run))]
    if run.problems:
        items = "".join(f"<li>{escape(problem)}</li>" for problem in run.problems)
        parts.append(f"could not be read:<ul>{items}</ul>")
    return f"<div>{''.join(f'<div>{part}</div>' for part in parts)}</div>"


def _sections_of_run(run: RunTables, name: str, coverage: Sequence[Mapping[str, Any]] | None) -> Iterator[str]:
    info, counts = run.info, {table: run.count(table) for table in TABLES}
    is_small = counts["stats"] <= MAX_STATS
    history = history_of(run, ("metrics", "coverage", "stats") if is_small else ("metrics", "coverage"))
    facts = {key: info.get(key) for key in ("status", "error", "device", "seed")} | {"started": _start_text(info)}
    texts = [f"{key} {escape(str(value))}" for key, value in facts.items() if value is not None]
    names = dict.fromkeys((str(info.get("name") or run.path.name), str(run.path)))
    yield " · ".join(f"<b>{escape(each)}</b>" for each in names)
    yield " · ".join([*texts, *([f"{history.step:,} steps"] if history.step else [])])
    yield "rows: " + (" · ".join(f"{table} {count:,}" for table, count in counts.items() if count) or "none")
    yield _html_table("Metrics", METRIC_COLUMNS, [row.cells for row in metric_rows(history)], f"{name}.metrics")
    found = [(each.what, each.where, each.step, each.value) for each in findings(run, evaluates=False)]
    yield _html_table("Findings", ("finding", "where", "step", "value"), found, f"{name}.findings")
    rows, count = layer_rows(history, MAX_ROWS)
    layers = [row.cells for row in rows]
    yield _html_table("Layers, largest change first", LAYER_COLUMNS, layers, f"{name}.stats", count)
    if not is_small:
        yield "The layers are not shown: there are too many rows of statistics."
    hooks = [[row[key] for key in HOOK_COLUMNS] for row in coverage_rows(coverage or history.coverage)]
    yield _html_table("Coverage", HOOK_COLUMNS, hooks, f"{name}.coverage")
    heatmaps = (f"instrument.plot.heatmap({name}, hook={series.hook!r})" for series in list(history.series)[:1])
    calls = ", ".join(f"<code>{escape(call)}</code>" for call in (*heatmaps, f"instrument.report.make({name})"))
    yield f"More: {calls}"


def _sections_of_sweep(run: RunTables) -> Iterator[str]:
    runs = run.runs.dropna(axis="columns", how="all")
    failed = int((runs["status"] != "done").sum())
    yield f"<b>{len(runs)} runs</b> <code>{escape(str(run.path))}</code>" + (f" · {failed} not done" if failed else "")
    yield _html(runs.head(MAX_RUNS))
    if len(runs) > MAX_RUNS:
        yield f"and {len(runs) - MAX_RUNS:,} more"


def _start_text(info: dict[str, Any]) -> str | None:
    """Return the start and the duration, such as `2026-11-21 09:00:00, took 0:01:30`."""
    try:
        started = datetime.fromisoformat(info["started"])
        took = "" if info.get("ended") is None else f", took {datetime.fromisoformat(info['ended']) - started}"
    except (KeyError, TypeError, ValueError):
        return None
    return f"{started:%Y-%m-%d %H:%M:%S}{took}"


def _html_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], source: str, count: int | None = None
) -> str:
    """Return the first rows as a table with a title; an empty string without rows. `source`: the Python expression of all `count` rows."""
    if not rows:
        return ""
    cells = [["" if cell is None else cell for cell in row] for row in rows[:MAX_ROWS]]
    shown = pd.DataFrame(cells, columns=list(columns))
    rest = (len(rows) if count is None else count) - len(shown)
    more = f"and {rest:,} more in <code>{escape(source)}</code>" if rest else ""
    return f"<b>{title}</b>{_html(shown)}{more}"


def _html(frame: pd.DataFrame) -> str:
    with pd.option_context("display.max_colwidth", None):
        return frame.to_html(index=False, border=0, na_rep="", float_format="{:.4g}".format)
