"""A sweep in progress as text: the jobs with their status, progress and last metrics."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..sweeps.jobs import DONE, MISSING, RUNNING, SweepJob, count_by_status
from ..sweeps.lookup import jobs_in
from .live_run import LiveRun
from .terminal import STATUS_COLOURS, format_value, sparkline

OTHER_LINES = 5
SHOWN = ("loss", "accuracy")
ORDER = (RUNNING, "failed", "killed", "interrupted")  # other jobs come last


@dataclass(frozen=True)
class JobView:
    """The progress of a job.

    Attributes:
        step: The number of completed steps.
        steps: The number of steps of the job; None if it is unknown.
        losses: The training loss over the groups of steps; NaN for missing values.
        last: The last metrics, those of an evaluation if there was one, by name.
    """

    step: int
    steps: int | None
    losses: np.ndarray
    last: dict[str, float]


class LiveSweep:
    """The jobs of a sweep. Finished jobs are read once.

    Args:
        folder: The folder of the sweep, as a path or an address.
    """

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self._source = jobs_in(folder)
        self._jobs: list[SweepJob] = []
        self._runs: dict[Path, LiveRun] = {}
        self._views: dict[Path, JobView] = {}
        self._finished: set[Path] = set()
        self.is_complete = False

    @property
    def is_running(self) -> bool:
        """Whether a job is running or was not started yet."""
        return any(job.status in (RUNNING, MISSING) for job in self._jobs)

    @property
    def is_successful(self) -> bool:
        """Whether no job has failed so far."""
        return all(job.status in (DONE, RUNNING, MISSING) for job in self._jobs)

    def refresh(self, seconds: float = float("inf")) -> None:
        """Read the status of all jobs, and the new metrics of those that have not finished.

        Args:
            seconds: The time for reading metrics, in seconds. The rest follows in later calls. Default: no limit.
        """
        until = time.monotonic() + seconds
        self._source = jobs_in(self.folder)
        self._jobs = sorted(self._source.jobs(), key=lambda job: ORDER.index(job.status) if job.status in ORDER else 9)
        self.is_complete = True
        for job in self._jobs:
            if job.status == MISSING or job.folder in self._finished or not (job.folder / "run.json").exists():
                continue
            if time.monotonic() > until:
                self.is_complete = False
                return
            live = self._runs.setdefault(job.folder, LiveRun(job.folder, tables=("metrics",)))
            live.refresh()
            self._views[job.folder] = _view(live)
            if not live.is_running:
                self._finished.add(job.folder)
                del self._runs[job.folder]

    def frame(self, height: int | None = None) -> RenderableType:
        """Return the table of the jobs, running jobs first.

        Args:
            height: The number of lines on the screen. Default: None, all jobs are shown.
        """
        table = Table(box=None, pad_edge=False)
        for name in ("job", "status", "overrides"):
            table.add_column(name, no_wrap=True)
        for name in ("step", "loss over the steps", *SHOWN):
            table.add_column(name, no_wrap=True, justify="left" if " " in name else "right")
        shown = self._jobs if height is None else self._jobs[: max(1, height - OTHER_LINES)]
        for job in shown:
            view = self._views.get(job.folder)
            step, line, last = "", "", dict.fromkeys(SHOWN, "")
            if view is not None:
                step = f"{view.step:,}" + (f" of {view.steps:,}" if view.steps else "")
                line = sparkline(view.losses)
                last = {name: format_value(view.last.get(name, float("nan"))) for name in SHOWN}
            status = Text(job.status, style=STATUS_COLOURS.get(job.status, "yellow"))
            cells = (step, line, *last.values())
            table.add_row(Text(job.name), status, Text(self._source.label(job)), *(Text(cell) for cell in cells))
        more = f"\n{len(self._jobs) - len(shown)} more jobs" if len(shown) < len(self._jobs) else ""
        return Group(table, Text(f"{more}\n{len(self._jobs)} jobs: {count_by_status(self._jobs)}"))


def _view(live: LiveRun) -> JobView:
    losses = np.empty(0)
    training = live.metrics.get("train")
    if training is not None and "loss" in training.statistics:
        losses = training.values("loss", training.groups())[0]
    last: dict[str, float] = {}
    for name in SHOWN:
        found = [live.last_metric(phase, name) for phase in ("eval", "train", "forward")]
        last |= {name: next((value for value in found if value is not None), float("nan"))}
    return JobView(live.step, live.steps, losses, last)
