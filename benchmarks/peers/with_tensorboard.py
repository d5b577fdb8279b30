"""TensorBoard: a histogram of each tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from job import Job, Step, Training, leaf_hooks
from torch.utils.tensorboard import SummaryWriter


@contextmanager
def histograms(training: Training, folder: Path) -> Iterator[Step]:
    step_number = 0
    with SummaryWriter(str(folder)) as writer:

        def step() -> None:
            nonlocal step_number
            training.step().item()
            step_number += 1

        with leaf_hooks(
            training, lambda name, role, tensor: writer.add_histogram(f"{name}/{role}", tensor, step_number)
        ):
            yield step


JOBS = (Job("histograms of outputs and gradients, to event files", histograms),)
