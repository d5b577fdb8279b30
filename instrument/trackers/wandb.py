"""Weights & Biases tracker: a run in the mode of the environment (`WANDB_MODE`), with one call of `log` per step."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import wandb

from .step_summary import StepSummary, few_bins
from .tracking import Outcome, TrackedRun


class WeightsAndBiases:
    """Logs one dictionary per step. Its files are in `folder`, unless `WANDB_DIR` is set.

    A resumed run creates a new W&B run that starts at the first repeated step.
    """

    def __init__(self, run: TrackedRun, folder: Path) -> None:
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or re.sub(r"[/\\#?%:]", "_", run.name),
            name=run.title,
            config=dict(run.config),
            # An absolute path, since W&B's process may run in another folder.
            dir=os.environ.get("WANDB_DIR") or str(folder.absolute()),
            reinit="create_new",
        )

    def log(self, step: int, summary: StepSummary) -> None:
        """Pass the summary of a step to W&B's process, which sends it."""
        shown: dict[str, Any] = {**summary.scalars, **summary.texts}
        for tag, histogram in summary.histograms.items():
            shown[tag] = wandb.Histogram(np_histogram=few_bins(histogram))
        self.run.log(shown, step=step)

    def close(self, outcome: Outcome) -> None:
        self.run.finish(exit_code=0 if outcome == "done" else 1)
