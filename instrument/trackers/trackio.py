"""Trackio tracker: writes to the local project with the name of the run, or to that of environment variables (`TRACKIO_PROJECT`, ...)."""

from __future__ import annotations

import os
from pathlib import Path

import trackio

from .step_summary import StepSummary, few_bins
from .tracking import Outcome, TrackedRun

LEVELS = {"info": trackio.AlertLevel.INFO, "warning": trackio.AlertLevel.WARN, "error": trackio.AlertLevel.ERROR}


class Trackio:
    """Logs one dictionary per step, and events as alerts. A resumed run creates a new run that starts at the first repeated step."""

    def __init__(self, run: TrackedRun, folder: Path) -> None:  # noqa: ARG002
        self.run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT") or run.name,
            name=run.title,
            config=dict(run.config),
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, summary: StepSummary) -> None:
        """Pass the summary of a step to the thread of Trackio, which writes it."""
        histograms = {
            tag: trackio.Histogram(np_histogram=few_bins(histogram)) for tag, histogram in summary.histograms.items()
        }
        if summary.scalars or histograms:
            self.run.log({**summary.scalars, **histograms}, step=step)
        for tag, lines in summary.texts.items():
            self.run.alert(tag, lines, LEVELS[tag.rpartition("/")[2]], step=step)

    def close(self, outcome: Outcome) -> None:  # noqa: ARG002
        self.run.finish()
