"""The processes that torchrun started for one run: collective exchange, and shutdown of all processes if one fails."""

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
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from ...errors import InstrumentError, RankError, first_line
from ...runtime.own_operations import own_collectives
from ...runtime.restarts import store_of_restart
from ...storage.lock import is_locked, lock_of
from ...storage.parts import written_parts

Number = TypeVar("Number", int, float)
FAILURE = "instrument/failure"  # key in the store that torchrun provides
_CONNECTION_ERRORS = re.compile(r"gloo|nccl|\bpeer\b|sigterm", re.IGNORECASE)  # errors that collectives raise
LOCK_TIMEOUT = 2.0  # seconds that the operating system may need to release the locks of a killed process


class _FailureMessage(NamedTuple):
    code: int
    message: str


class _PeerFailedError(Exception):
    """Another process reported a failure during an exchange: `values`, by rank, contain its `_FailureMessage`."""

    def __init__(self, values: list[Any]) -> None:
        super().__init__("another process has failed")
        self.values = values


@dataclass
class Processes:
    """The process group of a run, as seen by one of its processes. Create it with `open`."""

    rank: int
    size: int
    store: Any  # key-value store of torchrun, shared by all processes
    control: Any  # gloo process group for control messages

    @classmethod
    def open(cls) -> Processes:
        """Join the process group and set the CUDA device of this process.

        The backend is gloo for CPU tensors and, if CUDA and NCCL are available, NCCL for CUDA tensors. Blocks until all
        processes have joined.
        """
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        store, rank, size = next(iter(rendezvous("env://")))
        store = store_of_restart(store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size)
        if torch.cuda.is_available():
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", rank)) % torch.cuda.device_count())
        return cls(rank, size, store, dist.new_group(backend="gloo"))

    def close(self) -> None:
        self.wait()
        dist.destroy_process_group()

    @property
    def is_rank_zero(self) -> bool:
        """Whether this is rank 0, the only process that prints and writes shared files."""
        return self.rank == 0

    def exchange(self, value: Any) -> list[Any]:
        """Gather one object from each process, in rank order. Raise a _PeerFailedError if another one sent its error instead."""
        values = self._gather(value)
        if any(isinstance(value, _FailureMessage) for value in values):
            raise _PeerFailedError(values)
        return values

    @own_collectives()
    def _gather(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.control)
        return values

    @own_collectives()
    def from_rank_zero(self, values: list[Any]) -> list[Any]:
        """Return the picklable objects that rank 0 passes. All processes must call this.

        An empty list costs one broadcast of a number.
        """
        count = torch.tensor(len(values))
        dist.broadcast(count, src=0, group=self.control)
        received: list[Any] = [*values] if self.is_rank_zero else [None] * int(count)
        if received:
            dist.broadcast_object_list(received, src=0, group=self.control)
        return received

    @own_collectives()
    def wait(self) -> None:
        dist.barrier(group=self.control)

    @contextmanager
    def synced_errors(self) -> Iterator[None]:
        """Stop all processes if the `with` block, which all of them enter, fails in any of them. The process group is then destroyed.

        Rank 0 raises its own exception, or else a RankError. The others raise SystemExit with the highest exit code.
        """
        error: Exception | None = None
        try:
            yield
            values = self._gather(None)
        except _PeerFailedError as peer_error:
            values = peer_error.values
        except Exception as raised:
            error = raised
            code = error.exit_code if isinstance(error, InstrumentError) else 1
            values = self._gather(_FailureMessage(code, str(error) or type(error).__name__))
        failed = {rank: value for rank, value in enumerate(values) if isinstance(value, _FailureMessage)}
        if not failed:
            return
        # The group is destroyed while all ranks are alive: its threads could abort a process that exits.
        dist.destroy_process_group()
        if self.is_rank_zero and error is not None:
            raise error
        if not self.is_rank_zero:
            raise SystemExit(max(code for code, _ in failed.values())) from error
        rank, (code, message) = next(iter(failed.items()))
        raise RankError(f"rank {rank}: {message}", rank, code)

    @contextmanager
    def stop_together(self, folder: Path, on_failure: Callable[[int], None]) -> Iterator[None]:
        """Raise a RankError if another process fails first, or is killed, during the `with` block.

        The locks in the folder of the run show which processes are alive. `on_failure` gets the rank that failed first.
        """
        try:
            yield
        except BaseException as error:
            if not dist.is_initialized():  # `synced_errors` has already shut down all processes and reported the error.
                if isinstance(error, RankError):
                    on_failure(error.rank)
                raise
            # torchrun sends SIGTERM to all processes when one ends. The error is reported and files are written first.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            first = self._find_first_failure(error, folder)
            if first is None:
                raise
            rank, reason = first
            on_failure(rank)
            if rank == self.rank:
                raise
            message = f"rank {rank} {reason}; rank {self.rank} cannot continue without it and stops"
            raise RankError(message, rank) from error

    def _find_first_failure(self, error: BaseException, folder: Path) -> tuple[int, str] | None:
        """Return the rank of the process that failed first, and what happened, such as `was killed`."""
        own = self.rank, f"failed with {type(error).__name__}: {first_line(error)}"
        if type(error) is KeyboardInterrupt:  # Ctrl-C reaches all processes.
            return None
        if not _is_lost_connection(error):
            return self._register(own)
        for dead_rank in _poll_dead_ranks(folder, self.rank, self.size):
            if self.store.check([FAILURE]):
                return self._register(own)
            if dead_rank is not None:
                return self._register((dead_rank, "was killed"))
        return None if isinstance(error, KeyboardInterrupt) else self._register(own)

    def _register(self, failure: tuple[int, str]) -> tuple[int, str]:
        """Register a failure in the store and return the failure that was registered first by any process."""
        rank, reason = json.loads(self.store.compare_set(FAILURE, "", json.dumps(failure)))
        return rank, reason


@contextmanager
def report_dead_ranks(folder: Path, on_failure: Callable[[int], None]) -> Iterator[None]:
    """Raise a RankError if a collective fails in a custom training loop because another process ended; see `stop_together`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    try:
        yield
    except Exception as error:
        if not _is_lost_connection(error):
            raise
        dead_rank = next((dead for dead in _poll_dead_ranks(folder, rank, size) if dead is not None), None)
        if dead_rank is None:
            raise
        on_failure(dead_rank)
        raise RankError(f"rank {dead_rank} has ended; rank {rank} cannot continue without it", dead_rank) from error


def _poll_dead_ranks(folder: Path, own_rank: int, size: int) -> Iterator[int | None]:
    """Poll the locks of a run for `LOCK_TIMEOUT` seconds. Processes that write to another folder cannot be checked."""
    deadline = time.monotonic() + LOCK_TIMEOUT
    ended = {part.rank for part in written_parts(folder, "metrics")}
    ranks = [each for each in range(size) if each != own_rank and (each in ended or lock_of(folder, each).exists())]
    while time.monotonic() < deadline:
        yield next((rank for rank in ranks if not is_locked(folder, rank)), None)
        time.sleep(0.05)


def _is_lost_connection(error: BaseException | None) -> bool:
    """Return whether an error, or the cause of an `InstrumentError`, may result from the end of another process."""
    if error is None:
        return False
    if isinstance(error, InstrumentError):
        return _is_lost_connection(error.__cause__)
    can_be = isinstance(error, RuntimeError | KeyboardInterrupt)
    return isinstance(error, dist.DistError) or (can_be and _CONNECTION_ERRORS.search(str(error)) is not None)
