"""Checks of a sweep before its folder is created, and defaults of its launcher."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

from omegaconf import DictConfig, OmegaConf

from ..config.hydra_internals import BASIC_SWEEPER
from ..errors import ConfigError, Problem
from ..storage.remote_folder import REMOTE_KEY, check_no_secret, check_remote
from ..training.sweeps.jobs import expand_sweep, overrides_of, sweep_overrides, values_of
from ..training.sweeps.objective import OBJECTIVE_KEY, read_objective

SLURM, SLURM_LOCAL = "SlurmLauncher", "LocalLauncher"
RAY = "RayLauncher"
THREADS = "OMP_NUM_THREADS"
RUN_DIR, SWEEP_DIR = "hydra.run.dir", "hydra.sweep.dir"


def check_sweep(config: DictConfig) -> None:
    """Check the launcher, the folder and the jobs of a sweep, and that torchrun did not start this process.

    Raises:
        ConfigError: The sweep cannot run.
        SystemExit: torchrun started this process, and its rank is not 0.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        if os.environ.get("RANK", "0") != "0":
            raise SystemExit(ConfigError.exit_code)  # Only rank 0 prints the error.
        message = "each process of torchrun would start its own sweep"
        fix = "run the sweep with one process per job, or run one torchrun command per job (docs/sweeps.md)"
        raise ConfigError(Problem("--multirun", message, given="torchrun ... -m instrument -m", fix=fix))
    folders = {override.partition("=")[0].lstrip("+"): override for override in overrides_of(config.hydra, "hydra")}
    if RUN_DIR in folders and not folders.keys() & {SWEEP_DIR, "hydra.sweep.subdir"}:
        message = "a sweep does not use this folder; its jobs are in subfolders of hydra.sweep.dir"
        written = folders[RUN_DIR]
        raise ConfigError(Problem(RUN_DIR, message, given=written, fix=f"set {SWEEP_DIR}={written.partition('=')[2]}"))
    launcher = config.hydra.launcher["_target_"].rpartition(".")[2]
    if launcher == SLURM and shutil.which("srun") is None:
        message = "Slurm is not available: its command srun is not on the PATH"
        fix = "use a machine that can submit Slurm jobs; or slurm_local, which starts local processes instead"
        given = config.hydra.runtime.choices["hydra/launcher"]
        raise ConfigError(Problem("hydra/launcher", message, given=given, fix=fix))
    if config.hydra.sweeper["_target_"] == BASIC_SWEEPER and not expand_sweep(config.hydra):
        message = "the sweep has no jobs: one of its overrides has no values"
        raise ConfigError(Problem("", message, given=overrides_of(config.hydra, "task")))


def check_no_secrets(config: DictConfig) -> None:
    """Check that `sink.remote` contains no credentials, in the configuration or in an override, before it is saved.

    Raises:
        ConfigError: An address contains credentials or is invalid.
    """
    check_remote(OmegaConf.select(config, REMOTE_KEY))
    for override in overrides_of(config.hydra, "task"):
        if REMOTE_KEY in override:
            check_no_secret(override.replace("\\", ""), REMOTE_KEY)


def check_objective(config: DictConfig) -> None:
    """Validate an objective that is the same for all jobs. An objective that differs is validated by each job.

    Raises:
        ConfigError: The objective is invalid.
    """
    plain: Any = OmegaConf.to_container(config, resolve=False)
    written = plain.get(OBJECTIVE_KEY)
    is_swept = OBJECTIVE_KEY in values_of(sweep_overrides(config.hydra))
    if isinstance(written, str) and not is_swept and "${" not in written and written != "???":
        read_objective(written, plain.get("hooks"))


def prepare_launcher(config: DictConfig) -> None:
    """Set defaults that a launcher leaves open: threads per job, and the terminal output of several jobs."""
    launcher = config.hydra.launcher["_target_"].rpartition(".")[2]
    if launcher == RAY:
        os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # keeps similar lines of different jobs
        if not sys.stdout.isatty():
            os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    if launcher == SLURM_LOCAL and config.hydra.sweeper["_target_"] == BASIC_SWEEPER and THREADS not in os.environ:
        share = max((os.cpu_count() or 1) // len(expand_sweep(config.hydra)), 1)  # All jobs run concurrently.
        config.hydra.overrides.hydra.append(f"++hydra.job.env_set.{THREADS}='{share}'")
