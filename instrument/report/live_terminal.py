"""A run in progress as text: progress, metrics, findings, and the layers whose statistics changed most."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import timedelta
from typing import Literal

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..analysis.diagnosis import diagnoses
from ..analysis.overview import LAYER_COLUMNS, METRIC_COLUMNS, SHOWN_METRICS, Row, layer_rows, metric_rows, sparkline
from .evidence import curve_of
from .live_run import LiveRun

COLOURS = {"info": "", "warning": "yellow", "error": "bold red"}
STATUS_COLOURS = {"running": "cyan", "done": "green", "failed": "red", "killed": "red"}
MAX_FINDINGS, FEWEST_LAYERS = 6, 5
OTHER_LINES = 14  # of a frame: headings, empty lines, the first finding, progress and metrics of an evaluation


def frame(live: LiveRun, height: int | None = None) -> RenderableType:
    """Return the current state of a run.

    Args:
        live: The run.
        height: The number of lines on the screen. Default: None, all layers are shown.
    """
    findings, status = live.findings(), live.info["status"]
    name = (str(live.info.get("name") or live.folder.name), "bold")
    text = Text.assemble(name, "  ", (status, STATUS_COLOURS.get(status, "yellow")), f"  step {live.progress}")
    seconds = live.last_metric("train", "seconds")
    if live.is_running and live.steps and seconds:
        text.append(f"  {timedelta(seconds=round(max(0, live.steps - live.step) * seconds))} left")
    if live.info.get("error"):
        text.append(f"\n{live.info['error']}", style="red")
    parts: list[RenderableType] = [text, Text()]
    if live.metrics:
        parts += [_table("", METRIC_COLUMNS, ("last",), metric_rows(live)), Text()]
    parts += [Text(f"{problem}", style="red") for problem in live.problems]
    shown = findings if height is None else findings[:MAX_FINDINGS]
    if findings:
        table = _table("Findings", ("rule", "layer", "step", "message"), numbers=("step",))
        for finding in shown:
            step = "" if finding.step is None else f"{finding.step:,}"
            what = f"  {finding.what}" if finding.cause else finding.what  # below its cause
            cells = (Text(what), Text(finding.where), Text(step), Text(finding.value))
            table.add_row(*cells, style=COLOURS[finding.severity])
        parts.append(table)
        if len(findings) > len(shown):
            parts.append(Text(f"{len(findings) - len(shown)} more findings", style="dim"))
        for diagnosis in diagnoses(findings)[:1]:
            lead, curve = diagnosis.lead, curve_of(live, diagnosis.lead)
            parts += [] if curve is None else [Text(f"{lead.statistic} over the steps: {sparkline(curve[1])}")]
            parts += [Text(f"Next: {lead.advice}")] if lead.advice else []
        parts.append(Text())
    if live.series:
        room = None if height is None else max(FEWEST_LAYERS, height - OTHER_LINES - len(SHOWN_METRICS) - len(shown))
        rows, total = layer_rows(live, room)
        count = f"{len(rows)} of {total}" if len(rows) < total else str(total)
        parts.append(_table(f"Layers, largest change first ({count})", LAYER_COLUMNS, LAYER_COLUMNS[-2:], rows))
    if live.fraction_read < 1:
        parts.append(Text(f"reading earlier steps: {live.fraction_read:.0%}", style="dim"))
    return Group(*parts)


def _table(title: str, columns: Sequence[str], numbers: Collection[str], rows: Iterable[Row] = ()) -> Table:
    table = Table(title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in columns:
        justify: Literal["left", "right"] = "right" if name in numbers else "left"
        table.add_column(name, justify=justify, no_wrap=name not in ("message", "layer", "hook"))  # shortened if narrow
    for row in rows:
        table.add_row(*map(Text, row.cells), style=COLOURS["error"] if row.is_problem else "")
    return table
