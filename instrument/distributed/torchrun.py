"""Detection of a launch by torchrun. PyTorch is imported only if torchrun started several processes."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError, Mistake
from ..folders.run_folder import refuse_other_count
from ..spec.config import RunConfig

if TYPE_CHECKING:
    from .processes import Processes


@cache
def joined() -> Processes | None:
    """Join the process group of this run, once per process.

    Returns:
        The processes, after all of them have joined; None for a single process (`WORLD_SIZE` is unset or 1).
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    from .processes import Processes

    return Processes.open()


def leads() -> bool:
    """Return whether this is rank 0, the only process that prints and writes shared files."""
    return os.environ.get("RANK", "0") == "0"


def agreed(processes: Processes | None) -> AbstractContextManager[None]:
    """Return `Processes.agreed()`, or a context manager that does nothing for a single process."""
    return nullcontext() if processes is None else processes.agreed()


def failing_together(
    processes: Processes | None, folder: Path, failed: Callable[[int], None]
) -> AbstractContextManager[None]:
    """Return `Processes.failing_together()`, or a context manager that does nothing for a single process."""
    return nullcontext() if processes is None else processes.failing_together(folder, failed)


def check_processes(config: RunConfig, processes: Processes | None) -> None:
    """Check that the configuration fits the number of processes.

    Args:
        config: Configuration of the run.
        processes: Processes of the run; None for a single process.

    Raises:
        ConfigError: The resumed run had another number of processes; `train.parallel` is set for a single process or
            missing for several; or `plan` is set for several processes. The message names a valid command or value.
    """
    ranks, parallel = 1 if processes is None else processes.size, config.train.parallel
    if config.resume is not None:
        refuse_other_count(Path(config.resume), ranks)
    if ranks == 1 and parallel is not None:
        allowed = "torchrun --nproc-per-node N -m instrument ...; or null"
        raise ConfigError(Mistake("train.parallel", "there is one process", written=parallel, allowed=allowed))
    if ranks > 1 and parallel is None:
        problem = f"torchrun started {ranks} processes, each of which would train for itself"
        raise ConfigError(Mistake("train.parallel", problem, allowed="ddp, fsdp2"))
    if ranks > 1 and config.plan:
        allowed = "the same command without torchrun and train.parallel"
        raise ConfigError(Mistake("plan", "a plan is made by one process", written=True, allowed=allowed))
