"""Rerun of the jobs of a sweep that are not done, in the same folder, with the same numbers and the same launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from hydra.types import RunMode
from omegaconf import DictConfig, flag_override

from ..config.hydra_internals import BASIC_SWEEPER, config_loader, launcher_of
from ..errors import ConfigError, Problem
from ..storage.lock import FolderLock
from ..storage.run_record import checkpoint_steps
from ..training.sweep_jobs import DONE, RUNNING, STOPPED, Sweep, SweepJob, folder_override, overrides_of
from .job import archive, job

WHERE = "--rerun"
KEPT_ON_RESUME = ("quiet", "report")  # overrides that a resumed run accepts in addition to `resume`


def rerun(sweep: Sweep) -> int:
    """Run all jobs of a sweep that are neither done, stopped by a rule, nor running. Return their number.

    A job with a checkpoint is resumed. Any other job starts again, and its old folder is moved to `.aside`.
    """
    _check_rerunnable(sweep)
    in_progress = Problem(WHERE, "the sweep is in progress in another process", given=str(sweep.folder))
    with FolderLock(sweep.folder).held(ConfigError(in_progress)), _working_directory(Path(sweep.hydra.runtime.cwd)):
        unfinished = [sweep_job for sweep_job in sweep.jobs() if sweep_job.status not in (DONE, STOPPED, RUNNING)]
        setup_globals()
        loader = config_loader()
        given = [*overrides_of(sweep.hydra, "hydra"), folder_override("hydra.sweep.dir", sweep.folder)]
        overrides = [*given, *overrides_of(sweep.hydra, "task")]
        config = loader.load_configuration("config", overrides=overrides, run_mode=RunMode.MULTIRUN)
        launcher = launcher_of(config, loader, numbered_job)
        prepared = [_overrides(sweep_job) for sweep_job in unfinished]
        at_once = sweep.hydra.sweeper.max_batch_size or len(prepared) or 1
        for first in range(0, len(prepared), at_once):
            launcher.launch(prepared[first : first + at_once], initial_job_idx=first)
        return len(unfinished)


def numbered_job(config: DictConfig) -> float | None:
    """Run one job again, with the number of its folder: Hydra would use its position among the jobs that are run again."""
    hydra = HydraConfig.get()
    with flag_override(hydra, "readonly", False):  # type: ignore[arg-type]
        hydra.job.num = int(hydra.sweep.subdir)
    return job(config)


def _check_rerunnable(sweep: Sweep) -> None:
    if sweep.has_known_jobs:
        return
    sweeper = str(sweep.hydra.sweeper["_target_"])
    if sweeper != BASIC_SWEEPER:
        message = "this sweeper chooses each job from the results of earlier jobs, so the missing jobs are not known"
        study = "hydra.sweeper.storage=sqlite:///study.db and hydra.sweeper.study_name=NAME"
        fix = f"run the command of the sweep again; with {study} it continues the existing study"
        raise ConfigError(Problem(WHERE, message, given=sweeper.rpartition(".")[2], fix=fix))
    message = "the folders of the jobs are not named by job number (hydra.sweep.subdir), or their values are shuffled"
    raise ConfigError(Problem(WHERE, message))


@contextmanager
def _working_directory(folder: Path) -> Iterator[None]:
    if not os.access(folder, os.X_OK):
        raise ConfigError(Problem(WHERE, "cannot enter the folder in which the sweep was started", given=str(folder)))
    sys.path.insert(0, str(folder))
    try:
        with chdir(folder):
            yield
    finally:
        sys.path.remove(str(folder))


def _overrides(sweep_job: SweepJob) -> list[str]:
    """Return the overrides with which a job runs again. A job without a checkpoint is archived first."""
    subdir = f"hydra.sweep.subdir={sweep_job.name}"
    if (sweep_job.folder / "run.json").exists() and checkpoint_steps(sweep_job.folder):
        kept = [override for override in sweep_job.overrides if override.partition("=")[0] in KEPT_ON_RESUME]
        # `hydra.output_subdir=null` keeps the record that Hydra wrote when the run started.
        return [folder_override("resume", sweep_job.folder), *kept, subdir, "hydra.output_subdir=null"]
    if sweep_job.folder.exists():
        archive(sweep_job.folder)
    return [*sweep_job.overrides, subdir]
