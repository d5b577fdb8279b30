"""A sweep in progress as text: the jobs with their status, progress and last metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..report.charts import metric_curves
from ..report.numbers import format_number
from ..report.sweep_charts import MAX_CURVE_VALUES
from ..sweeps.jobs import DONE, INTERRUPTED, KILLED, MISSING, RUNNING, SweepJob, count_by_status
from ..sweeps.lookup import jobs_in
from .live_run import LiveRun
from .terminal import STATUS_COLOURS, sparkline

OTHER_LINES = 5
SHOWN = ("loss", "accuracy")
ORDER = (RUNNING, "failed", KILLED, INTERRUPTED)  # other jobs come last


@dataclass(frozen=True)
class JobView:
    """The progress of a job.

    Attributes:
        progress: The number of completed steps, and of all steps if it is known.
        losses: The training loss over the groups of steps; NaN for missing values.
        last: The last metrics, those of an evaluation if there was one, by name; None without a value.
        info: The content of run.json.
        curves: The metrics of each phase over steps; see `metric_curves`.
        version: The version of the sweep at the last change.
    """

    progress: str
    losses: np.ndarray
    last: dict[str, float | None]
    info: dict[str, Any]
    curves: dict[str, Any]
    version: int


class LiveSweep:
    """The jobs of a sweep. Finished jobs are read once.

    Args:
        folder: The folder of the sweep, as a path or an address.

    Attributes:
        folder: The folder.
        source: The jobs and the keys in which they differ.
        jobs: The jobs in the order of their numbers, as of the last refresh.
        views: The progress of the jobs that have started, by folder.
        version: The number of refreshes that found changes.
        is_complete: Whether all rows have been read.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.source = jobs_in(folder)
        self.jobs: list[SweepJob] = []
        self.views: dict[Path, JobView] = {}
        self.version = 0
        self.is_complete = False
        self._runs: dict[Path, LiveRun] = {}
        self._finished: dict[Path, str] = {}  # the statuses of jobs that have ended

    @property
    def is_running(self) -> bool:
        """Whether a job is running or will be started. After a kill or Ctrl-C, the sweep starts no more jobs."""
        found = {job.status for job in self.jobs}
        return RUNNING in found or (MISSING in found and not found & {KILLED, INTERRUPTED})

    @property
    def is_successful(self) -> bool:
        """Whether no job has failed so far."""
        return all(job.status in (DONE, RUNNING, MISSING) for job in self.jobs)

    def refresh(self, seconds: float = float("inf")) -> bool:
        """Read the status of all jobs, and the new metrics of those that have not finished.

        Args:
            seconds: The time for reading metrics, in seconds. The rest follows in later calls. Default: no limit.

        Returns:
            Whether anything changed.
        """
        until = time.monotonic() + seconds
        self.source = jobs_in(self.folder)
        jobs = self.source.jobs()
        changed = jobs != self.jobs
        self.jobs = jobs
        self.version += 1
        self.is_complete = True
        for job in jobs:
            if self._finished.get(job.folder) == job.status or not (job.folder / "run.json").exists():
                continue
            if time.monotonic() > until:
                self.is_complete = False
                break
            if job.folder not in self._runs:
                self._runs[job.folder] = LiveRun(job.folder, ("metrics",), MAX_CURVE_VALUES)
            live = self._runs[job.folder]
            if live.refresh() or job.folder not in self.views:
                self.views[job.folder] = self._view(live)
                changed = True
            if live.is_running:
                self._finished.pop(job.folder, None)
            else:
                self._finished[job.folder] = live.info["status"]
                del self._runs[job.folder]
        self.version -= not changed
        return changed

    def _view(self, live: LiveRun) -> JobView:
        losses = np.empty(0)
        training = live.metrics.get("train")
        if training is not None and "loss" in training.statistics:
            losses = training.values("loss", training.groups())[0]
        last: dict[str, float | None] = {}
        for name in SHOWN:
            found = [live.last_metric(phase, name) for phase in ("eval", "train", "forward")]
            last[name] = next((value for value in found if value is not None), None)
        return JobView(live.progress, losses, last, live.info, metric_curves(live), self.version)

    def frame(self, height: int | None = None) -> RenderableType:
        """Return the table of the jobs, running jobs first.

        Args:
            height: The number of lines on the screen. Default: None, all jobs are shown.
        """
        table = Table(box=None, pad_edge=False)
        for name in ("job", "status", "overrides"):
            table.add_column(name, no_wrap=name != "overrides")  # the column that is shortened on a narrow screen
        for name in ("step", "loss over the steps", *SHOWN):
            table.add_column(name, no_wrap=True, justify="left" if " " in name else "right")
        jobs = sorted(self.jobs, key=lambda job: ORDER.index(job.status) if job.status in ORDER else len(ORDER))
        shown = jobs if height is None else jobs[: max(1, height - OTHER_LINES)]
        for job in shown:
            view = self.views.get(job.folder)
            cells = [""] * (2 + len(SHOWN))
            if view is not None:
                cells = [view.progress, sparkline(view.losses), *(format_number(view.last[name]) for name in SHOWN)]
            status = Text(job.status, style=STATUS_COLOURS.get(job.status, "yellow"))
            label = Text(self.source.label(job), no_wrap=True, overflow="ellipsis")
            table.add_row(Text(job.name), status, label, *(Text(cell) for cell in cells))
        more = f"\n{len(self.jobs) - len(shown)} more jobs" if len(shown) < len(self.jobs) else ""
        return Group(table, Text(f"{more}\n{len(self.jobs)} jobs: {count_by_status(self.jobs)}"))
