"""Whether torchrun started this process as one of several; PyTorch is imported only where it did."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ConfigError, Mistake
from ...spec.config import RunConfig
from ..folder import refuse_other_count

if TYPE_CHECKING:
    from .processes import Processes


@cache
def joined() -> Processes | None:
    """The processes of this run, once all of them are here; None where this is the only one."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return None
    from .processes import Processes

    return Processes.open()


def leads() -> bool:
    """Whether this process speaks for all of them."""
    return os.environ.get("RANK", "0") == "0"


def agreed(processes: Processes | None) -> AbstractContextManager[None]:
    """`Processes.agreed`, where there are several."""
    return nullcontext() if processes is None else processes.agreed()


def failing_together(
    processes: Processes | None, folder: Path, failed: Callable[[int], None]
) -> AbstractContextManager[None]:
    """`Processes.failing_together`, where there are several."""
    return nullcontext() if processes is None else processes.failing_together(folder, failed)


def check_processes(config: RunConfig, processes: Processes | None) -> None:
    """Whether what is asked for can be done by the processes that there are.

    Raises:
        ConfigError: With the way to do it.
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
