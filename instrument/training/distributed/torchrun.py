"""Detection of a launch by torchrun. PyTorch is imported only if torchrun started several processes."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ...config.experiment import RunConfig
from ...errors import ConfigError, Problem
from ...storage.run_folder import check_process_count
from ...storage.run_record import read_record

if TYPE_CHECKING:
    from .process_group import Processes


@cache
def process_group() -> Processes | None:
    """Join the process group of this run, once per process. None for a single process (`WORLD_SIZE` is unset or 1)."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    from .process_group import Processes

    return Processes.open()


def is_rank_zero() -> bool:
    """Return whether this is rank 0, the only process that prints and writes shared files."""
    return os.environ.get("RANK", "0") == "0"


def synced_errors(processes: Processes | None) -> AbstractContextManager[None]:
    """Return `Processes.synced_errors()`, or a context manager that does nothing for a single process."""
    return nullcontext() if processes is None else processes.synced_errors()


def check_processes(config: RunConfig, processes: Processes | None) -> None:
    """Raise a ConfigError unless the configuration, its mesh and a resumed run fit the number of processes; None for a single one."""
    ranks, parallel = 1 if processes is None else processes.size, config.train.parallel
    if config.resume is not None:
        record = read_record(Path(config.resume), "resume")
        check_process_count(record, ranks, "resume", f"instrument resume={config.resume}")
    if ranks == 1 and parallel is not None and not config.plan:
        message = "this requires several processes, but the run has one"
        fix = "start the run with torchrun --nproc-per-node N -m instrument ..."
        raise ConfigError(Problem("train.parallel", message, given=str(parallel), allowed="null", fix=fix))
    if ranks > 1 and parallel is None:
        message = f"torchrun started {ranks} processes, which would train independently of each other"
        raise ConfigError(Problem("train.parallel", message, allowed="ddp, fsdp2, or a mesh"))
    if ranks > 1 and parallel is not None and parallel.size not in (None, ranks):
        fix = f"start torchrun with {parallel.size} processes, or change the mesh"
        message = f"the mesh has {parallel.size} processes, but torchrun started {ranks}"
        allowed = f"sizes whose product is {ranks}"
        raise ConfigError(Problem("train.parallel.mesh", message, dict(parallel.sizes), allowed, fix=fix))
    if ranks > 1 and config.plan:
        fix = "run the same command without torchrun"
        raise ConfigError(Problem("plan", "a dry run requires a single process", given=True, fix=fix))
