"""A sweep in progress as text: the jobs with their status, progress and last metrics."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text

from ..analysis.overview import sparkline
from ..formatting import format_number
from ..training.sweep_jobs import DONE, INTERRUPTED, KILLED, MISSING, RUNNING, SweepJob, count_by_status, jobs_in
from .charts import metric_curves
from .live_run import STATUS_COLOURS, LiveRun, table_of
from .sweep_page import MAX_CURVE_VALUES, METRICS

OTHER_LINES = 5
ORDER = (RUNNING, "failed", KILLED, INTERRUPTED)  # other jobs come last


class LiveSweep:
    """The jobs of a sweep, whose folder is a path or an address."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.source = jobs_in(folder)  # the jobs, and the keys in which they differ
        self.jobs: list[SweepJob] = []  # in the order of their numbers, as of the last refresh
        self.runs: dict[
            Path, LiveRun
        ] = {}  # the metrics of jobs that have started; those of a finished one are read once
        self.curves: dict[Path, dict[str, Any]] = {}  # of these jobs; see `metric_curves`
        self.changed: dict[Path, int] = {}  # the version of the last change of these jobs
        self.version = 0  # the number of refreshes that found changes
        self.is_complete = False  # whether all rows have been read

    @property
    def is_running(self) -> bool:
        """Whether a job is running or will be started. After a kill or Ctrl-C, the sweep starts no more jobs."""
        statuses = {job.status for job in self.jobs}
        return RUNNING in statuses or (MISSING in statuses and not statuses & {KILLED, INTERRUPTED})

    @property
    def is_successful(self) -> bool:
        """Whether no job has failed so far."""
        return all(job.status in (DONE, RUNNING, MISSING) for job in self.jobs)

    @property
    def state(self) -> list[dict[str, Any]]:
        """What `watch --once --json` prints: the jobs, with the steps and last metrics of those that have started."""
        return [
            vars(job) | ({"step": live.step, "steps": live.steps, "metrics": last_metrics(live)} if live else {})
            for job, live in ((job, self.runs.get(job.folder)) for job in self.jobs)
        ]

    def refresh(self, seconds: float = float("inf")) -> bool:
        """Read the status of all jobs, and the new metrics of those that have not finished. Return whether anything changed.

        Metrics are read for at most so many seconds; the rest follows in later calls.
        """
        until = time.monotonic() + seconds
        self.source = jobs_in(self.folder)
        jobs = self.source.jobs()
        changed = jobs != self.jobs
        self.jobs = jobs
        self.version += 1
        self.is_complete = True
        for job in jobs:
            live = self.runs.get(job.folder)
            is_read = live is not None and not live.is_running and live.info["status"] == job.status
            if is_read or not (job.folder / "run.json").exists():
                continue
            if time.monotonic() > until:
                self.is_complete = False
                break
            if live is None:
                live = self.runs[job.folder] = LiveRun(job.folder, ("metrics",), MAX_CURVE_VALUES)
            if live.refresh() or job.folder not in self.changed:
                self.changed[job.folder], self.curves[job.folder] = self.version, metric_curves(live)
                changed = True
        self.version -= not changed
        return changed

    def frame(self, height: int | None = None) -> RenderableType:
        """Return the table of the jobs, running jobs first: those that fit on a screen with `height` lines, or all of them."""
        columns = ("job", "status", "overrides", "step", "loss over the steps", *METRICS)
        table = table_of("", columns, numbers=("step", *METRICS))
        jobs = sorted(self.jobs, key=lambda job: ORDER.index(job.status) if job.status in ORDER else len(ORDER))
        shown = jobs if height is None else jobs[: max(1, height - OTHER_LINES)]
        for job in shown:
            live = self.runs.get(job.folder)
            cells = [""] * (2 + len(METRICS))
            if live is not None:
                losses = self.curves[job.folder].get("train", {}).get("statistics", {}).get("loss", [[]])[0]
                line = sparkline(np.array(losses, np.float64))  # NaN for missing values
                cells = [live.progress, line, *map(format_number, last_metrics(live).values())]
            status = Text(job.status, style=STATUS_COLOURS.get(job.status, "yellow"))
            label = Text(self.source.label(job), no_wrap=True, overflow="ellipsis")
            table.add_row(Text(job.name), status, label, *(Text(cell) for cell in cells))
        more = f"\n{len(self.jobs) - len(shown)} more jobs" if len(shown) < len(self.jobs) else ""
        return Group(table, Text(f"{more}\n{len(self.jobs)} jobs: {count_by_status(self.jobs)}"))


def last_metrics(live: LiveRun) -> dict[str, float | None]:
    """Return the last metrics of a run, those of an evaluation if there was one, by name; None without a value."""
    last_values = {name: [live.last_metric(phase, name) for phase in ("eval", "train", "forward")] for name in METRICS}
    return {name: next((value for value in values if value is not None), None) for name, values in last_values.items()}
