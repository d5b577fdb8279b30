"""HTML representation of a run or sweep in notebooks. The tables are those of pandas, which a notebook formats."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any

import pandas as pd

from ..tables.schemas import TABLES
from .findings import findings
from .overview import LAYER_COLUMNS, METRIC_COLUMNS, coverage_rows, layer_rows, metric_rows
from .run_history import history_of
from .run_tables import RunTables

MAX_RUNS = 50  # maximum number of runs of a sweep that are shown
MAX_ROWS = 15  # maximum number of rows of any other table
MAX_STATS = 500_000  # maximum number of rows of statistics that are read, which takes a few seconds
HOOK_COLUMNS = ("hook", "kind", "locations", "fired", "expected")


def to_html(run: RunTables, name: str = "run", coverage: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Return the HTML; large tables are not held in memory.

    Args:
        name: The Python expression of the run in the examples of the last line.
        coverage: The coverage so far of a run in progress. Default: that of the run, whose table is written at its end.
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
    yield _table("Metrics", METRIC_COLUMNS, [row.cells for row in metric_rows(history)], f"{name}.metrics")
    found = [(each.what, each.where, each.step, each.value) for each in findings(run, evaluates=False)]
    yield _table("Findings", ("finding", "where", "step", "value"), found, f"{name}.findings")
    layers, count = layer_rows(history, MAX_ROWS)
    yield _table("Layers, largest change first", LAYER_COLUMNS, [row.cells for row in layers], f"{name}.stats", count)
    if not is_small:
        yield "The layers are not shown: there are too many rows of statistics."
    hooks = [[row[key] for key in HOOK_COLUMNS] for row in coverage_rows(coverage or history.coverage)]
    yield _table("Coverage", HOOK_COLUMNS, hooks, f"{name}.coverage")
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


def _table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]], source: str, count: int | None = None
) -> str:
    """Return the first rows as a table with a title; an empty string without rows.

    Args:
        source: The Python expression of all rows.
        count: The number of all rows. Default: that of `rows`.
    """
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
