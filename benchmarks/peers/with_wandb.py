"""Weights & Biases, offline: `watch`, which records parameters and their gradients, but no activations."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from job import Job, Step, Training

os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
import wandb


@contextmanager
def watch(training: Training, folder: Path, log: str) -> Iterator[Step]:
    with wandb.init(dir=folder, project="benchmark") as run:
        run.watch(training.model, log=log, log_freq=1)

        def step() -> None:
            run.log({"loss": training.step().item()})

        yield step
        run.unwatch(training.model)


JOBS = (
    Job("histograms of parameter gradients, no activations, to a .wandb file", partial(watch, log="gradients")),
    Job("histograms of parameters and their gradients, no activations", partial(watch, log="all")),
)
