"""A run in progress as text: progress, metrics, findings, and the layers whose statistics changed most."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import timedelta
from typing import Literal, NamedTuple

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..analysis.diagnosis import diagnoses
from ..analysis.plot_data import RecordedSeries, short_names, shown_first
from ..config.schedule import STEP_PHASES
from .evidence import WIDE, curve_of
from .live_run import LiveRun
from .numbers import format_number
from .run_history import METRICS
from .step_history import StepHistory

COLOURS = {"info": "", "warning": "yellow", "error": "bold red"}
STATUS_COLOURS = {"running": "cyan", "done": "green", "failed": "red", "killed": "red"}
LEVELS = "▁▂▃▄▅▆▇█"
NOT_FINITE = "!"
SPARKLINE_WIDTH = 24
LONGEST = 40  # maximum length of the name of a location, in characters
ROUNDING = 1e-9  # relative difference up to which values are shown as equal
SHOWN_METRICS = [name for name in METRICS if name != "seconds"]
MAX_FINDINGS, FEWEST_LAYERS = 6, 5
OTHER_LINES = 14  # of a frame: headings, empty lines, the first finding, progress and metrics of an evaluation


class LocationView(NamedTuple):
    """The most useful statistic of a location."""

    series: RecordedSeries
    location: str
    statistic: str
    values: np.ndarray  # over the groups of steps; NaN for a missing value
    not_finite: np.ndarray  # whether a group contains NaN or infinite elements
    last: float  # at the last step
    ratio: float  # of the last value to the median over the steps; NaN if it is undefined

    @property
    def urgency(self) -> tuple[bool, float]:
        """The sort key: locations with non-finite elements first, then those whose last value differs most."""
        change = 0.0 if np.isnan(self.ratio) else np.inf if self.ratio == 0 else abs(np.log(self.ratio))
        return not self.not_finite.any(), -change


def frame(live: LiveRun, height: int | None = None) -> RenderableType:
    """Return the current state of a run.

    Args:
        live: The run.
        height: The number of lines on the screen. Default: None, all layers are shown.
    """
    findings = live.findings()
    parts: list[RenderableType] = [_progress(live), Text()]
    if live.metrics:
        parts += [_metrics(live), Text()]
    parts += [Text(f"{problem}", style="red") for problem in live.problems]
    shown = findings if height is None else findings[:MAX_FINDINGS]
    if findings:
        table = _table("Findings", ("rule", "layer", "step", "message"), numbers=("step",))
        for finding in shown:
            step = "" if finding.when is None else f"{finding.when:,}"
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
        parts.append(_layers(live, room))
    if live.fraction_read < 1:
        parts.append(Text(f"reading earlier steps: {live.fraction_read:.0%}", style="dim"))
    return Group(*parts)


def _progress(live: LiveRun) -> Text:
    status = live.info["status"]
    name = str(live.info.get("name") or live.folder.name)
    text = Text.assemble(
        (name, "bold"), "  ", (status, STATUS_COLOURS.get(status, "yellow")), f"  step {live.progress}"
    )
    steps = live.steps
    seconds = live.last_metric("train", "seconds")
    if live.is_running and steps and seconds:
        text.append(f"  {timedelta(seconds=round(max(0, steps - live.step) * seconds))} left")
    if live.info.get("error"):
        text.append(f"\n{live.info['error']}", style="red")
    return text


def _metrics(live: LiveRun) -> Table:
    table = _table("", ("metric", "over the steps", "last"), numbers=("last",))
    for phase, history in live.metrics.items():
        custom = (name for name in history.statistics if name not in METRICS)
        for name in (*SHOWN_METRICS, *custom):
            if name not in history.statistics or (phase not in STEP_PHASES and name == "samples_per_second"):
                continue
            label = name if phase in STEP_PHASES else f"{phase} {name}"
            values = history.values(name, history.groups())[0]
            table.add_row(label, Text(sparkline(values)), format_number(float(history.last(name)[0])))
    for (phase, name), steps in live.not_finite.items():
        label = name if phase in STEP_PHASES else f"{phase} {name}"
        table.add_row(Text(label), Text(f"not finite from step {min(steps):,}"), style=COLOURS["error"])
    return table


def _layers(live: LiveRun, room: int | None) -> Table:
    """Return the table of locations, those that changed most first."""
    all_views = [view for series, history in live.series.items() for view in views_of(series, history)]
    views = sorted(all_views, key=lambda view: view.urgency)
    shown = views[:room]
    count = f"{len(shown)} of {len(views)}" if len(shown) < len(views) else str(len(views))
    columns = ("hook", "layer", "statistic", "over the steps", "last", "last/median")
    table = _table(f"Layers, largest change first ({count})", columns, numbers=columns[-2:])
    names = short_names([view.location for view in shown], LONGEST)
    for view in shown:
        hook = view.series.hook + ("" if view.series.phase in STEP_PHASES else f" ({view.series.phase})")
        ratio = "" if np.isnan(view.ratio) else f"{view.ratio:.3g}"
        line, last = sparkline(view.values, view.not_finite), "" if np.isnan(view.last) else format_number(view.last)
        numbers = (view.statistic, line, last, ratio)
        style = COLOURS["error"] if view.not_finite.any() else ""
        table.add_row(*(Text(cell) for cell in (hook, names[view.location], *numbers)), style=style)
    return table


def views_of(series: RecordedSeries, history: StepHistory) -> Iterator[LocationView]:
    """Yield the most useful statistic of each location of a series."""
    usual = ("l2", "rms", "abs_max") if series.is_of_parameters or series.is_gradient else ("std", "rms", "mean")
    names = history.statistics
    if not names:
        return
    statistic = shown_first(names, usual)
    groups = history.groups()
    values, last = history.values(statistic, groups), history.last(statistic)
    bad = np.zeros(values.shape, bool)
    for name in series.problem_counts:
        if name in names:
            bad |= history.values(name, groups) > 0
    for row, location in enumerate(history.locations):
        known = np.abs(values[row][~np.isnan(values[row])])
        median = float(np.median(known)) if len(known) else 0.0
        ratio = abs(float(last[row])) / median if median else float("nan")
        yield LocationView(series, location, statistic, values[row], bad[row], float(last[row]), ratio)


def sparkline(values: np.ndarray, not_finite: np.ndarray | None = None, width: int = SPARKLINE_WIDTH) -> str:
    """Return numbers as a line of small bars. Missing values are spaces.

    Args:
        values: The numbers; NaN for missing ones; shape [n].
        not_finite: Which of them are marked as not finite; bool, shape [n]. Default: none.
        width: The maximum number of characters. Several numbers share one: their mean is shown.
    """
    bad = np.zeros(len(values), bool) if not_finite is None else not_finite
    pieces = np.array_split(np.arange(len(values)), min(width, max(1, len(values))))
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
            marks.append(" ")
        else:
            level = 0.5 if is_constant else (mean - low) / (high - low)
            marks.append(LEVELS[min(len(LEVELS) - 1, int(level * len(LEVELS)))])
    return "".join(marks)


def _table(title: str, columns: Sequence[str], numbers: Collection[str]) -> Table:
    table = Table(title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in columns:
        justify: Literal["left", "right"] = "right" if name in numbers else "left"
        table.add_column(name, justify=justify, no_wrap=name not in ("message", "layer", "hook"))  # shortened if narrow
    return table
