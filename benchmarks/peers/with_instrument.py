"""instrument: statistics of every leaf's output and gradient, written to Parquet."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from job import Job, Step, Training

import instrument


@contextmanager
def statistics(training: Training, folder: Path) -> Iterator[Step]:
    record = {"layers": training.leaves(), "action": "record"}
    specs = {"outputs": {**record, "kind": "forward"}, "grads": {**record, "kind": "tensor"}}
    with instrument.attach(training.model, specs, optimizer=training.optimizer, out=folder / "run") as probe:

        def step() -> None:
            probe.end_step(loss=training.step())

        yield step


JOBS = (Job("11 statistics of outputs and gradients, to Parquet", statistics),)
