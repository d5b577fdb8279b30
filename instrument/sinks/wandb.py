"""Weights & Biases: a run in the mode that its environment says (`WANDB_MODE`), logged to once a step."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import wandb

from .content import Content
from .histogram import Histogram
from .tracking import Outcome, Tracked

MOST_BINS = 512  # of one of its histograms


class WeightsAndBiases:
    """Logs one dictionary a step.

    Args:
        run: What is tracked. A run that goes on is a new one there, which begins at the step that is done again.
        place: The folder that its own lies in, where `WANDB_DIR` says nothing else.
    """

    draws = True

    def __init__(self, run: Tracked, place: Path) -> None:
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or re.sub(r"[/\\#?%:]", "_", run.name),
            name=run.title,
            config=dict(run.config),
            dir=os.environ.get("WANDB_DIR") or str(place.absolute()),  # its own process may be in another folder
            reinit="create_new",
        )

    def log(self, step: int, content: Content) -> None:
        """Hand over the step; a process of its own sends it."""
        shown: dict[str, Any] = {**content.scalars, **content.texts}
        for tag, histogram in content.histograms.items():
            shown[tag] = wandb.Histogram(np_histogram=_few_bins(histogram))
        for tag, picture in content.pictures.items():
            shown[tag] = wandb.Image(picture.convert("RGB"))
        self.run.log(shown, step=step)

    def close(self, outcome: Outcome) -> None:
        """Wait until all is sent, or written."""
        self.run.finish(exit_code=0 if outcome == "done" else 1)


begin = WeightsAndBiases


def _few_bins(histogram: Histogram) -> tuple[Any, Any]:
    """Counts and edges, with several bins joined to one where there are more than it takes."""
    edges, counts = histogram.bins()
    joined = -(-len(counts) // MOST_BINS)
    starts = range(0, len(counts), joined)
    return np.add.reduceat(counts, starts), np.append(edges[starts], edges[-1])
