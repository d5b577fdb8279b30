"""Doing again what is not done of a sweep: in its folder, under the same numbers, through the same launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf, flag_override

from ...analysis.trainings import INERT, leaves_of
from ...errors import ConfigError, Mistake
from ...sinks.lock import FolderLock
from ..cli.launch import job
from ..cli.search_path import config_loader
from ..folder import ASIDE, CHECKPOINTS, git_revision, read_record
from .jobs import BASIC, DONE, RUNNING, Sweep, SweepJob, folder_override, overrides_of

WHERE = "--rerun"
MOST = 5  # changes that are told of
STILL_TOLD = ("quiet", "report")  # what a run that goes on is told, besides where it is


def rerun(sweep: Sweep) -> int:
    """Do all jobs of a sweep that are not done: from its checkpoint where a job has one, else from its beginning, with what
    it left put aside.

    Returns:
        How many jobs that were.

    Raises:
        ConfigError: The sweep still goes on, its jobs are not known beforehand, or the folder it was started in is gone.
    """
    _refuse_what_is_not_laid_out(sweep)
    with _held(sweep.folder), _working_directory(Path(sweep.hydra.runtime.cwd)):
        left = [each for each in sweep.jobs() if each.status not in (DONE, RUNNING)]
        config, loader = _composed(sweep)
        launcher = _launcher(config, loader)
        if left and (changes := _changes(sweep, config, loader)):
            print(
                f"warning: what these jobs are composed of has changed since others were done: {changes}",
                file=sys.stderr,
            )
        prepared = [_overrides(each) for each in left]
        at_once = sweep.hydra.sweeper.max_batch_size or len(prepared) or 1
        for first in range(0, len(prepared), at_once):
            launcher.launch(prepared[first : first + at_once], initial_job_idx=first)
        return len(left)


def numbered_job(config: DictConfig) -> float | None:
    """A job that is done again: its number is its folder's, not its place among those that are done again."""
    hydra = HydraConfig.get()
    with flag_override(hydra, "readonly", False):  # type: ignore[arg-type]
        hydra.job.num = int(hydra.sweep.subdir)
    return job(config)


def _refuse_what_is_not_laid_out(sweep: Sweep) -> None:
    if sweep.is_laid_out:
        return
    sweeper = str(sweep.hydra.sweeper["_target_"])
    if sweeper != BASIC:
        raise ConfigError(
            Mistake(
                WHERE,
                "this sweeper chooses each job by those before it: which are missing is not known beforehand",
                written=sweeper.rpartition(".")[2],
                allowed="the sweep's own command again: with hydra.sweeper.storage=sqlite:///study.db and "
                "hydra.sweeper.study_name=NAME it goes on with the trials that there are",
            )
        )
    raise ConfigError(Mistake(WHERE, "the folders of its jobs are not called by their numbers: hydra.sweep.subdir"))


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The sweep is this process's own inside."""
    lock = FolderLock(folder)
    if not lock.acquire():
        raise ConfigError(Mistake(WHERE, "this sweep still goes on, in another process", written=str(folder)))
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _working_directory(folder: Path) -> Iterator[None]:
    """Inside, everything is where it was when the sweep was started: its data, the user's own models and `conf`."""
    before = Path.cwd()
    try:
        os.chdir(folder)
    except OSError as error:
        problem = f"the folder that the sweep was started in cannot be entered: {error.strerror}"
        raise ConfigError(Mistake(WHERE, problem, written=str(folder))) from None
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        os.chdir(before)


def _composed(sweep: Sweep) -> tuple[DictConfig, ConfigLoader]:
    """The configuration of the sweep, as it would be begun now, and what composes those of its jobs."""
    setup_globals()
    loader = config_loader()
    given = [*overrides_of(sweep.hydra, "hydra"), folder_override("hydra.sweep.dir", sweep.folder)]
    overrides = [*given, *overrides_of(sweep.hydra, "task")]
    return loader.load_configuration("config", overrides=overrides, run_mode=RunMode.MULTIRUN), loader


def _launcher(config: DictConfig, loader: ConfigLoader) -> Launcher:
    context = HydraContext(config_loader=loader, callbacks=Callbacks(config))
    return Plugins.instance().instantiate_launcher(hydra_context=context, task_function=numbered_job, config=config)


def _changes(sweep: Sweep, config: DictConfig, loader: ConfigLoader) -> str:
    """In what the first job that is done would be another one now: `optimizer.lr: 0.1, now 0.2`; empty where in nothing.

    What a configuration takes from elsewhere, `${oc.env:HOME}`, is not compared.
    """
    done = next((each for each in sweep.jobs() if each.status == DONE and each.overrides), None)
    if done is None:
        return ""
    record = read_record(done.folder, WHERE)
    new: Any = OmegaConf.to_container(loader.load_sweep_config(config, list(done.overrides)), resolve=False)
    now = leaves_of({key: value for key, value in new.items() if key not in (*INERT, "hydra")})
    before = leaves_of({key: value for key, value in record["config"].items() if key not in INERT})
    taken = [key for key, word in now.items() if "${" in word]
    keys = [key for key in {**before, **now} if not any(f"{key}.".startswith(f"{other}.") for other in taken)]
    words = {key: (before.get(key, "null"), now.get(key, "null")) for key in keys}
    changed = [f"{key}: {one}, now {other}" for key, (one, other) in words.items() if one != other]
    code, revision = record.get("git_revision"), git_revision()
    changed += [f"git_revision: {code}, now {revision}"] if code != revision else []
    return "; ".join(changed[:MOST]) + (f"; ... ({len(changed)} in all)" if len(changed) > MOST else "")


def _overrides(each: SweepJob) -> list[str]:
    """What a job is composed of when it is done again."""
    place = f"hydra.sweep.subdir={each.name}"
    if _has_checkpoint(each.folder):
        told = [override for override in each.overrides if override.partition("=")[0] in STILL_TOLD]
        # Hydra's record of the run's beginning stays as it is.
        return [folder_override("resume", each.folder), *told, place, "hydra.output_subdir=null"]
    if each.folder.exists():
        _put_aside(each.folder)
    return [*each.overrides, place]


def _has_checkpoint(folder: Path) -> bool:
    return (folder / "run.json").exists() and any((folder / CHECKPOINTS).glob("step-*.pt"))


def _put_aside(folder: Path) -> None:
    """Move what a job left to where no reader takes it for a run of the sweep: `.aside/3.1`, then `.aside/3.2`, ..."""
    aside = folder.parent / ASIDE
    aside.mkdir(exist_ok=True)
    free = (aside / f"{folder.name}.{attempt}" for attempt in count(1))
    folder.rename(next(place for place in free if not place.exists()))
