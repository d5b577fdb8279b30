"""Rerun of the jobs of a sweep that are not done, in the same folder, with the same numbers and the same launcher."""

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

from ..analysis.training_config import INERT, leaves_of
from ..configuration.search_path import config_loader
from ..errors import ConfigError, Mistake
from ..folders.run_folder import ASIDE, CHECKPOINTS, git_revision, read_record
from ..sinks.lock import FolderLock
from ..sweeps.jobs import BASIC, DONE, RUNNING, Sweep, SweepJob, folder_override, overrides_of
from .job import job

WHERE = "--rerun"
MOST = 5  # maximum number of changes in the warning
STILL_TOLD = ("quiet", "report")  # overrides that a resumed run accepts in addition to `resume`


def rerun(sweep: Sweep) -> int:
    """Run all jobs of a sweep that are neither done nor running.

    A job with a checkpoint is resumed. Any other job starts again, and its old folder is moved to `.aside`.

    Args:
        sweep: Sweep to complete.

    Returns:
        Number of jobs that were run.

    Raises:
        ConfigError: The sweep is still running in another process, its jobs are not known in advance, or its working
            directory cannot be entered.
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
    """Run one job again, with the number of its folder as the job number.

    Hydra would use the position among the jobs that are run again.
    """
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
    """Hold the lock of a sweep folder during the `with` block.

    Raises:
        ConfigError: Another process holds the lock.
    """
    lock = FolderLock(folder)
    if not lock.acquire():
        raise ConfigError(Mistake(WHERE, "this sweep still goes on, in another process", written=str(folder)))
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _working_directory(folder: Path) -> Iterator[None]:
    """Change to the working directory of the sweep during the `with` block, and make its modules importable.

    Relative data paths, custom models and the `conf` folder are then found as in the original command.

    Raises:
        ConfigError: The directory cannot be entered.
    """
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
    """Compose the configuration of a sweep from the current files.

    Returns:
        The configuration, and the loader that composes the configurations of the jobs.
    """
    setup_globals()
    loader = config_loader()
    given = [*overrides_of(sweep.hydra, "hydra"), folder_override("hydra.sweep.dir", sweep.folder)]
    overrides = [*given, *overrides_of(sweep.hydra, "task")]
    return loader.load_configuration("config", overrides=overrides, run_mode=RunMode.MULTIRUN), loader


def _launcher(config: DictConfig, loader: ConfigLoader) -> Launcher:
    context = HydraContext(config_loader=loader, callbacks=Callbacks(config))
    return Plugins.instance().instantiate_launcher(hydra_context=context, task_function=numbered_job, config=config)


def _changes(sweep: Sweep, config: DictConfig, loader: ConfigLoader) -> str:
    """Describe how the first finished job would differ if it ran now.

    Values with an interpolation, such as `${oc.env:HOME}`, are not compared.

    Returns:
        The differences, for example `optimizer.lr: 0.1, now 0.2`; empty if nothing differs.
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
    """Return the overrides with which a job runs again. A job without a checkpoint is moved aside first."""
    place = f"hydra.sweep.subdir={each.name}"
    if _has_checkpoint(each.folder):
        told = [override for override in each.overrides if override.partition("=")[0] in STILL_TOLD]
        # `hydra.output_subdir=null` keeps the record that Hydra wrote when the run started.
        return [folder_override("resume", each.folder), *told, place, "hydra.output_subdir=null"]
    if each.folder.exists():
        _put_aside(each.folder)
    return [*each.overrides, place]


def _has_checkpoint(folder: Path) -> bool:
    return (folder / "run.json").exists() and any((folder / CHECKPOINTS).glob("step-*.pt"))


def _put_aside(folder: Path) -> None:
    """Move the folder of a job to `.aside/3.1`, `.aside/3.2`, ..., where it is not read as a run of the sweep."""
    aside = folder.parent / ASIDE
    aside.mkdir(exist_ok=True)
    free = (aside / f"{folder.name}.{attempt}" for attempt in count(1))
    folder.rename(next(place for place in free if not place.exists()))
