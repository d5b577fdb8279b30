"""HTML representation of a run or sweep in notebooks; the colors are those of the page, light or dark."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import datetime
from html import escape
from typing import Any

import pyarrow.dataset as ds

from ..spec.schedule import STEP_PHASES
from ..spec.tables import TABLES
from .findings import findings
from .run_tables import RunTables

MOST_RUNS = 50  # maximum number of runs of a sweep that are shown
MARKS = {
    "warning": "color: #c77700",
    "error": "color: #d9363e; font-weight: bold",
}  # readable on light and dark backgrounds
LINE = "1px solid rgba(128, 128, 128, 0.35)"
RIGHT = "text-align: right"


def to_html(run: RunTables) -> str:
    """Return the HTML; large tables are not read completely."""
    return _run_html(run) if run.folders == [run.path] else _sweep_html(run)


def _run_html(run: RunTables) -> str:
    info = run.info
    facts = {
        "status": (info["status"], "" if info["status"] in ("done", "running") else MARKS["error"]),
        "error": (info.get("error"), MARKS["error"]),
        "device": (info.get("device"), ""),
        "seed": (info["seed"], ""),
        "started": (_start_text(info), ""),
        **{name: (_number(info["metrics"].get(name)), "") for name in ("loss", "accuracy")},
    }
    facts_text = " · ".join(
        f'{escape(name)} <span style="{style}">{_cell(value)}</span>'
        for name, (value, style) in facts.items()
        if value is not None
    )
    counts = {name: run.count(name) for name in TABLES}
    steps = _steps(run)
    finding_rows = [
        ([finding.what, finding.where, finding.when, finding.value], MARKS.get(finding.severity, ""))
        for finding in findings(run)
    ]
    parts = [
        f"<b>{_cell(info.get('name') or run.path.name)}</b> <code>{_cell(run.path)}</code>",
        facts_text + (f" · {steps:,} steps" if steps else ""),
        _table(list(counts), [([f"{count:,}" for count in counts.values()], "")], right=range(len(counts))),
        _table(["finding", "where", "step", "value"], finding_rows, right=[2]) if finding_rows else "",
        _problems(run),
    ]
    return _block(parts)


def _sweep_html(run: RunTables) -> str:
    rows = [
        {
            "run": folder.relative_to(run.path),
            "status": info["status"],
            "seed": info["seed"],
            **overrides,
            **info["metrics"],
        }
        for folder, info, overrides in zip(run.folders, run.infos, run.overrides, strict=True)
    ]
    names = list(dict.fromkeys(name for row in rows for name, value in row.items() if value is not None))
    shown = [
        ([_number(row.get(name)) for name in names], "" if row["status"] == "done" else MARKS["error"])
        for row in rows[:MOST_RUNS]
    ]
    failed = sum(row["status"] != "done" for row in rows)
    parts = [
        f"<b>{len(rows)} runs</b> <code>{_cell(run.path)}</code>" + (f" · {failed} not done" if failed else ""),
        _table(names, shown),
        f"and {len(rows) - MOST_RUNS:,} more" if len(rows) > MOST_RUNS else "",
        _problems(run),
    ]
    return _block(parts)


def _problems(run: RunTables) -> str:
    items = "".join(f"<li>{_cell(problem)}</li>" for problem in run.problems)
    return f'<span style="{MARKS["warning"]}">could not be read:</span><ul>{items}</ul>' if items else ""


def _steps(run: RunTables) -> int:
    """Return the number of finished steps."""
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
    """Format a float with four digits; other values are returned unchanged."""
    return f"{value:.4g}" if isinstance(value, float) else value


def _cell(value: Any) -> str:
    return "" if value is None else escape(str(value))


def _table(names: Iterable[str], rows: Sequence[tuple[Sequence[Any], str]], right: Iterable[int] = ()) -> str:
    """Return an HTML table; each row consists of its cells and their common style."""
    aligned = set(right)

    def line(tag: str, cells: Iterable[Any], style: str = "") -> str:
        told = "".join(
            f'<{tag} style="padding: 2px 10px 2px 0; {RIGHT if i in aligned else "text-align: left"}; {style}">'
            f"{_cell(value)}</{tag}>"
            for i, value in enumerate(cells)
        )
        return f'<tr style="background: none; border-bottom: {LINE}">{told}</tr>'

    body = "".join(line("td", cells, style) for cells, style in rows)
    # Outside of notebooks, tables do not always inherit the text color of the page.
    return f'<table style="border-collapse: collapse; margin: 6px 0; color: inherit; font-size: inherit">{line("th", names)}{body}</table>'


def _block(parts: Iterable[str]) -> str:
    return f"<div>{''.join(f'<div>{part}</div>' for part in parts if part)}</div>"
