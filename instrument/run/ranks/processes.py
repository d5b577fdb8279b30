"""The processes that torchrun started for one run: how they agree, and what becomes of the others when one fails."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ...errors import InstrumentError, RankError
from ...sinks.lock import is_locked

FAILURE = "instrument/failure"  # in the store that torchrun keeps for the processes
_LOST = re.compile(r"gloo|nccl|\bpeer\b|sigterm", re.IGNORECASE)  # in errors of collectives
PATIENCE = 2.0  # seconds in which the operating system lets go of what a killed process held


class _Refusal(NamedTuple):
    """What a process says in place of an answer: it has failed, with which exit code, and how."""

    code: int
    told: str


class _RefusedError(Exception):
    """Another process has failed, and the others were told when this one asked for something else."""

    def __init__(self, said: list[Any]) -> None:
        super().__init__("another process has failed")
        self.said = said


class Failure(NamedTuple):
    """Which process failed first, and how."""

    rank: int
    told: str


@dataclass
class Processes:
    """The processes of one run, of which this is one; `open` makes it.

    Attributes:
        rank: Which one this is, from 0.
        local_rank: Which one on this machine.
        size: How many there are.
    """

    rank: int
    local_rank: int
    size: int
    store: Any
    control: Any

    @classmethod
    def open(cls) -> Processes:
        """Join the others: gloo for the CPU, NCCL for GPUs where there are some."""
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        store, rank, size = next(iter(rendezvous("env://")))
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        if torch.cuda.is_available():
            torch.cuda.set_device(local_rank % torch.cuda.device_count())
        return cls(rank, local_rank, size, store, dist.new_group(backend="gloo"))

    def close(self) -> None:
        """Part from the others, once all of them are here."""
        self.wait()
        dist.destroy_process_group()

    @property
    def leads(self) -> bool:
        """Whether this is the process that speaks for all of them."""
        return self.rank == 0

    def exchange(self, mine: Any) -> list[Any]:
        """What each of them says, in the order of the ranks."""
        said = self._gathered(mine)
        if any(isinstance(one, _Refusal) for one in said):
            raise _RefusedError(said)
        return said

    def _gathered(self, mine: Any) -> list[Any]:
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, mine, group=self.control)
        return said

    def sum(self, number: int) -> int:
        """The sum over all of them."""
        return sum(self.exchange(number))

    def wait(self) -> None:
        """Until all of them are here."""
        dist.barrier(group=self.control)

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """What fails inside in one process stops all of them, and the first one tells it.

        Raises:
            RankError: Another process failed; or what failed here, in the first process.
            SystemExit: In the others, which say nothing.
        """
        error: Exception | None = None
        try:
            yield
            said = self._gathered(None)
        except _RefusedError as refused:
            said = refused.said
        except Exception as raised:
            error = raised
            code = error.exit_code if isinstance(error, InstrumentError) else 1
            said = self._gathered(_Refusal(code, str(error) or type(error).__name__))
        failed = {rank: one for rank, one in enumerate(said) if isinstance(one, _Refusal)}
        if not failed:
            return
        dist.destroy_process_group()  # while all are here: threads that are left may abort a process that ends
        if self.leads and error is not None:
            raise error
        if not self.leads:
            raise SystemExit(max(code for code, _ in failed.values())) from error
        rank, (code, told) = next(iter(failed.items()))
        raise RankError(f"rank {rank}: {told}", rank, code)

    @contextmanager
    def failing_together(self, folder: Path, failed: Callable[[int], None]) -> Iterator[None]:
        """When one process fails inside, or is killed, the others end too, and say because of which.

        Args:
            folder: The run's folder, whose locks tell which processes are alive.
            failed: Called with the rank of the one that failed first.

        Raises:
            RankError: Another process failed first.
        """
        try:
            yield
        except BaseException as error:
            if not dist.is_initialized():  # agreed upon, and told
                if isinstance(error, RankError):
                    failed(error.rank)
                raise
            _ignore_termination()  # torchrun sends it to all when one has ended; what is to be said and written comes first
            first = self._first_failure(error, folder)
            if first is None:
                raise
            failed(first.rank)
            if first.rank == self.rank:
                raise
            message = f"rank {first.rank} {first.told}; rank {self.rank} cannot go on without it, and stops"
            raise RankError(message, first.rank) from error

    def _first_failure(self, error: BaseException, folder: Path) -> Failure | None:
        """Who failed first; None where this process was interrupted, and no other one has failed."""
        own = Failure(self.rank, f"failed with {type(error).__name__}: {str(error).partition(chr(10))[0]}")
        if type(error) is KeyboardInterrupt:  # Ctrl-C, which all of them get
            return None
        if not _is_lost_connection(error):
            return self._claim(own)
        for gone in _who_is_gone(folder, self.rank, self.size):
            if self.store.check([FAILURE]):
                return self._claim(own)
            if gone is not None:
                return self._claim(Failure(gone, "was killed"))
        return None if isinstance(error, KeyboardInterrupt) else self._claim(own)

    def _claim(self, failure: Failure) -> Failure:
        """The first failure that any process has put down, which may be this one."""
        put = self.store.compare_set(FAILURE, "", json.dumps(failure))
        return Failure(*json.loads(put))


@contextmanager
def told_who_died(folder: Path, failed: Callable[[int], None]) -> Iterator[None]:
    """Of a loop of one's own: where a collective fails since another process is gone, it is told which.

    Args:
        folder: The run's folder, whose locks tell which processes are alive.
        failed: Called with the rank of the one that is gone.

    Raises:
        RankError: In place of the collective's error.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        yield
    except Exception as error:
        if not _is_lost_connection(error):
            raise
        gone = next((gone for gone in _who_is_gone(folder, rank, size) if gone is not None), None)
        if gone is None:
            raise
        failed(gone)
        raise RankError(f"rank {gone} has ended; rank {rank} cannot go on without it", gone) from error


def _who_is_gone(folder: Path, own: int, size: int) -> Iterator[int | None]:
    """Again and again for a while, the first of the other processes that holds no lock on the folder, if there is one."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        yield next((rank for rank in range(size) if rank != own and not is_locked(folder, rank)), None)
        time.sleep(0.05)


def _ignore_termination() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _is_lost_connection(error: BaseException | None) -> bool:
    """Whether an error may come of another process's end, or was raised in place of one that does."""
    if error is None:
        return False
    if isinstance(error, InstrumentError):
        return _is_lost_connection(error.__cause__)
    is_pytorchs = isinstance(error, RuntimeError | KeyboardInterrupt) and _LOST.search(str(error)) is not None
    return isinstance(error, dist.DistError) or is_pytorchs
