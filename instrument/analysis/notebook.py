"""HTML representation of a run or sweep in notebooks. The tables are those of pandas, which a notebook formats."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from html import escape
from typing import Any

import pandas as pd
import pyarrow.dataset as ds

from ..config.schedule import STEP_PHASES
from ..tables.schemas import TABLES
from .findings import findings
from .run_tables import RunTables

MAX_RUNS = 50  # maximum number of runs of a sweep that are shown


def to_html(run: RunTables) -> str:
    """Return the HTML; large tables are not read completely."""
    parts = [*(_of_run(run) if run.folders == [run.path] else _of_sweep(run))]
    if run.problems:
        items = "".join(f"<li>{escape(problem)}</li>" for problem in run.problems)
        parts.append(f"could not be read:<ul>{items}</ul>")
    return f"<div>{''.join(f'<div>{part}</div>' for part in parts)}</div>"


def _of_run(run: RunTables) -> Iterator[str]:
    info = run.info
    names = ("loss", "accuracy")
    facts = {name: info.get(name) for name in ("status", "error", "device", "seed")}
    facts |= {"started": _start_text(info), **{name: _number(info["metrics"].get(name)) for name in names}}
    texts = [f"{name} {escape(str(value))}" for name, value in facts.items() if value is not None]
    yield f"<b>{escape(str(info.get('name') or run.path.name))}</b> <code>{escape(str(run.path))}</code>"
    yield " · ".join([*texts, *([f"{steps:,} steps"] if (steps := _steps(run)) else [])])
    yield _table(pd.DataFrame([{name: f"{run.count(name):,}" for name in TABLES}]))
    rows = [(finding.what, finding.where, finding.when, finding.value) for finding in findings(run)]
    if rows:
        yield _table(pd.DataFrame(rows, columns=["finding", "where", "step", "value"]).astype({"step": "Int64"}))


def _of_sweep(run: RunTables) -> Iterator[str]:
    runs = run.runs.dropna(axis="columns", how="all")
    failed = int((runs["status"] != "done").sum())
    yield f"<b>{len(runs)} runs</b> <code>{escape(str(run.path))}</code>" + (f" · {failed} not done" if failed else "")
    yield _table(runs.head(MAX_RUNS))
    if len(runs) > MAX_RUNS:
        yield f"and {len(runs) - MAX_RUNS:,} more"


def _steps(run: RunTables) -> int:
    batches = run.scan("metrics", ["step"], ds.field("phase").isin(STEP_PHASES))
    return max((int(batch["step"].to_numpy().max()) + 1 for batch in batches if batch.num_rows), default=0)


def _start_text(info: dict[str, Any]) -> str | None:
    """Return the start and the duration, such as `2026-11-21 09:00:00, took 0:01:30`."""
    try:
        started = datetime.fromisoformat(info["started"])
        took = "" if info.get("ended") is None else f", took {datetime.fromisoformat(info['ended']) - started}"
    except (KeyError, TypeError, ValueError):
        return None
    return f"{started:%Y-%m-%d %H:%M:%S}{took}"


def _number(value: Any) -> Any:
    return f"{value:.4g}" if isinstance(value, float) else value


def _table(frame: pd.DataFrame) -> str:
    with pd.option_context("display.max_colwidth", None):
        return frame.to_html(index=False, border=0, na_rep="", float_format="{:.4g}".format)
