"""Jobs of a sweep that their launcher starts again: Ray after the loss of a node, Slurm after a preemption."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Mapping
from itertools import count
from pathlib import Path
from typing import Any

from ..config.experiment import RunConfig
from ..storage.lock import is_written
from ..storage.run_record import PREVIOUS_ATTEMPTS, checkpoint_steps, read_record

LOCK_SECONDS = 30.0  # seconds until the previous process of the job has ended
OPENED = (".hydra", "instrument.log")  # written by Hydra before the job begins


def previous_attempt(folder: Path, overrides: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the run.json of the previous attempt of a job.

    None if it does not exist, if the run is in progress, or if the run has other overrides: the folder is then refused.
    """
    if not (folder / "run.json").exists():
        return None
    record = read_record(folder, "hydra.sweep.dir")
    if record.get("overrides") != json.loads(json.dumps(overrides, default=str)):
        return None
    deadline = time.monotonic() + LOCK_SECONDS
    while is_written(folder):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.1)
    return record


def restarted(config: RunConfig, raw: dict[str, Any], folder: Path) -> tuple[RunConfig, dict[str, Any]]:
    """Return the configuration with which a job starts again: it resumes from a checkpoint, or its files are archived."""
    if not checkpoint_steps(folder):
        archive(folder, OPENED)
        return config, raw
    return config.model_copy(update={"resume": str(folder)}), {**raw, "resume": str(folder)}


def archive(folder: Path, kept: Collection[str] = ()) -> None:
    """Move the files of a job, except those with names in `kept`, to `.aside/3.1`, ..., where they are not read as a run."""
    attempts = (folder.parent / PREVIOUS_ATTEMPTS / f"{folder.name}.{attempt}" for attempt in count(1))
    target = next(path for path in attempts if not path.exists())
    target.mkdir(parents=True)
    for path in [path for path in folder.iterdir() if path.name not in kept]:
        path.rename(target / path.name)
    if not kept:
        folder.rmdir()
