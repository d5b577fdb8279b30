"""The folder of a run, its lock and its run.json."""

from __future__ import annotations

import json
import platform
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError, Problem, RankError, SinkError, first_line
from ..fields.pip_extras import DISTRIBUTION, installed_version
from ..runtime.deferred_interrupts import uninterrupted
from ..runtime.restarts import store_of_restart
from .folder_snapshot import Snapshot
from .lock import FolderLock, is_locked
from .remote_folder import REMOTE_KEY, check_is_local
from .run_record import (
    PACKAGES,
    Status,
    end_if_running,
    final_entries,
    git_revision,
    read_record,
    write_json,
)

RANK_0_TIMEOUT = 60.0  # Seconds that the other processes of a run wait for rank 0.
VISIBLE_TIMEOUT = 5.0  # seconds after which a network file system shows a new file on all machines
_BELOW = ("[!.]*/run.json", "[!.]*/[!.]*/run.json")  # as in runs/NAME/TIME; not the files of a replaced run
_runs = count()  # The n-th run of a process has the same number in all processes.


def create_free_folder(folder: Path, where: str) -> None:
    """Create the folder of a new run. Raise a ConfigError if it contains a run, is a remote address, or cannot be written."""
    check_is_local(folder, where)
    if (folder / "run.json").exists():
        message = "the folder already contains a run"
        fix = "choose another folder, or " + ("pass overwrite=True" if where == "out" else "delete this one")
        raise ConfigError(Problem(where, message, given=str(folder), fix=fix))
    check_writable(folder, where)


def check_writable(folder: Path, where: str) -> None:
    """Create a folder if it does not exist. Raise ConfigError if it cannot be created or written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        test_file = folder / ".writable"
        with uninterrupted():
            test_file.touch()
            test_file.unlink(missing_ok=True)  # Another process may check the same folder at the same time.
    except OSError as error:
        message = f"the folder is not writable: {error.strerror}"
        raise ConfigError(Problem(where, message, str(folder), fix=f"set {where} to a writable folder")) from None


def check_process_count(record: Mapping[str, Any], present: int, where: str, command: str) -> None:
    """Raise a ConfigError unless a run is resumed or repeated with the same number of processes."""
    count = record.get("ranks", 1)
    if count != present:
        many = "one process" if count == 1 else f"{count} processes"
        program = "python" if count == 1 else f"torchrun --nproc-per-node {count}"
        message = f"the run was started with {many}, and the same number is required"
        raise ConfigError(Problem(where, message, given=present, allowed=str(count), fix=f"run {program} -m {command}"))


class RunAnnouncement:
    """The announcement of the folder of a run by rank 0, through the store of the process group.

    The processes are on several machines, whose folders of the run may be the same one (a shared file system) or not. Each process
    creates an announcement, at the same point of the program.
    """

    def __init__(self) -> None:
        self._run = f"instrument/{next(_runs)}"
        self._store = store_of_restart()

    def send(self, record: Mapping[str, Any]) -> None:
        """Announce on rank 0 that the run has begun, with the content of its run.json."""
        self._store.set(f"{self._run}/begun", json.dumps([socket.gethostname(), record], default=str))

    def refuse(self, error: BaseException) -> None:
        """Announce on rank 0 that the run has not begun, with the reason."""
        with suppress(RuntimeError):  # the store may be gone
            self._store.set(f"{self._run}/refused", first_line(error) or type(error).__name__)

    def receive(self, timeout: float) -> tuple[str, dict[str, Any]] | str:
        """Return the host of rank 0 and the content of its run.json, or why it has none after at most `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self._store.check([f"{self._run}/begun"]):
            if self._store.check([f"{self._run}/refused"]):
                return f"rank 0 did not start a run: {self._store.get(f'{self._run}/refused').decode()}"
            if time.monotonic() > deadline:
                return f"rank 0 did not start a run in this folder within {timeout:.0f} seconds"
            time.sleep(0.05)  # unlike `wait` of the store, this ends at Ctrl-C
        host, record = json.loads(self._store.get(f"{self._run}/begun"))
        return host, record

    def check_shared(self, folder: Path, host: str, record: Mapping[str, Any]) -> bool:
        """Return whether rank 0 on `host`, which announced `record`, uses this folder, and tell rank 0 if it does not."""
        deadline = time.monotonic() + (0.0 if host == socket.gethostname() else VISIBLE_TIMEOUT)
        while not (is_shared := is_locked(folder) or _has_ended(folder, record)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not is_shared:
            self._store.set(f"{self._run}/separate", "")
        return is_shared

    @property
    def has_separate_folders(self) -> bool:
        """Whether a process does not share the folder of rank 0. False if the store is gone."""
        with suppress(RuntimeError):
            return bool(self._store.check([f"{self._run}/separate"]))
        return False


def _has_ended(folder: Path, record: Mapping[str, Any]) -> bool:
    """Return whether a folder has the run of this record; rank 0 unlocks it at the end, maybe before another process begins."""
    with suppress(OSError, ValueError):
        found = json.loads((folder / "run.json").read_text())
        return "rank" not in found and all(found.get(key) == record.get(key) for key in ("started", "resumed"))
    return False


class DiscardedRunError(Exception):
    """Ends the recording of a run that its trainer starts again: the folder is restored to its previous content."""


class RunFolder:
    """The folder of a new run. This process holds its lock and writes its run.json.

    Args:
        on_error: `stop` (default) raises an error if run.json cannot be written; `continue` ignores the error.
        overwrite: Whether to replace the run in the folder. Its files are restored if the new run is refused or discarded.
            Default: False.
        record: The entries of run.json. The file is written again after each change.

    Raises:
        ConfigError: The folder or a folder in it contains a run, another process has just started a run there, or it cannot be written.
        SinkError: From all methods: run.json cannot be written.
    """

    _has_begun = False  # whether the block of `recording` has begun
    # The errors before the training that restore the folder.
    _refusals: tuple[type[BaseException], ...] = (ConfigError,)

    def __init__(
        self,
        path: Path,
        *,
        where: str = "hydra.run.dir",
        on_error: Literal["stop", "continue"] = "stop",
        overwrite: bool = False,
        **record: Any,
    ) -> None:
        self.path = path
        self.on_error = on_error
        self.record: dict[str, Any] = {}
        self._announcement = RunAnnouncement() if record.get("ranks", 1) > 1 else None
        self._snapshot = Snapshot(path, replaces=where if overwrite else None)
        self._lock = FolderLock(path)
        try:
            create_free_folder(path, where)
            # `load` reads a folder with run.json as one run.
            if not self._snapshot.has_aside and (below := next(chain.from_iterable(map(path.glob, _BELOW)), None)):
                message = f"the folder contains other runs, such as {below.parent.relative_to(path)}, which `load` would no longer find"
                fix = f"choose another folder, or a new one in this folder: {path / 'NAME'}"
                raise ConfigError(Problem(where, message, given=str(path), fix=fix))
            if not self._lock.acquire():
                message = "another process has just started a run in this folder"
                raise ConfigError(Problem(where, message, given=str(path)))
            create_free_folder(path, where)  # A run may have started and ended since the first check.
            versions = {"python": platform.python_version(), "instrument": installed_version(DISTRIBUTION)}
            self.record = {
                "status": "running",
                "started": datetime.now(UTC).isoformat(timespec="seconds"),
                "ended": None,
                "error": None,
                **record,
                "versions": versions | {name: installed_version(name) for name in PACKAGES},
                "git_revision": git_revision(),
                "command": sys.argv,
            }
            self._write()
            if self._announcement is not None:
                self._announcement.send(self.record)
        except BaseException as error:
            self._lock.release()
            if self._announcement is not None:
                self._announcement.refuse(error)
            if isinstance(error, ConfigError):  # the new files belong to another run
                self._snapshot.restore_replaced()
            else:
                self._snapshot.restore()
            raise

    @classmethod
    def reopen(cls, path: Path, *, on_error: Literal["stop", "continue"] = "stop") -> RunFolder:
        """Open the folder of a stopped run. Raise a ConfigError if it has no run, or one that is complete or in progress."""
        record = read_record(path, "resume")
        if record["status"] == "done":
            raise ConfigError(Problem("resume", "the run is already done; there is nothing to resume", given=str(path)))
        folder = cls.__new__(cls)
        folder.path, folder.on_error = path, on_error
        folder._announcement = RunAnnouncement() if record.get("ranks", 1) > 1 else None
        folder._snapshot = Snapshot(path)
        folder._lock = FolderLock(path)
        if not folder._lock.acquire():
            raise ConfigError(Problem("resume", "the run is in progress in another process", given=str(path)))
        now = datetime.now(UTC).isoformat(timespec="seconds")
        resumed = [*record.get("resumed", []), {"at": now, "command": sys.argv}]
        record.pop("failed_rank", None)
        folder.record = {**record, "status": "running", "ended": None, "error": None, "resumed": resumed}
        if folder._announcement is not None:
            folder._announcement.send(folder.record)
        return folder

    @property
    def is_shared(self) -> bool:
        """Whether all processes of the run write to this folder, as far as they have reported."""
        return self._announcement is None or not self._announcement.has_separate_folders

    @contextmanager
    def recording(
        self, has_started: Callable[[], bool], stop_reason: Callable[[], str | None] = lambda: None
    ) -> Iterator[None]:
        """Write to run.json how the block ended: `done`, `stopped`, `interrupted` or `failed`. Then release the lock.

        A forked process leaves the folder to its parent.

        Args:
            has_started: Returns whether training has begun. If a configuration error occurs earlier, or the run is
                discarded, the folder is restored to its previous content.
            stop_reason: Returns why the training was stopped; None if it is complete. Default: complete.
        """
        self._has_begun = True
        try:
            self._write()  # that the run is in progress, after `reopen`
            yield
            reason = stop_reason()
            self.finish("done" if reason is None else "stopped", reason)
        except BaseException as error:
            if interrupt := _interrupt_behind(error):  # code that an interrupt ends may raise its own error
                self.finish("interrupted", error)
                raise interrupt  # noqa: B904 - its context is the error
            # A signal has prevented the end of the block, or the block is in a generator that is closed before its end.
            if isinstance(error, GeneratorExit):
                self.finish("interrupted", error)
            elif isinstance(error, DiscardedRunError) or (isinstance(error, self._refusals) and not has_started()):
                self._discard()
            else:
                self.finish("failed", error)
            raise

    def close(self) -> None:
        """End a run if a signal prevented the beginning or the end of its block. If the block has not begun, restore the folder."""
        if self._has_begun:
            self.finish("interrupted", KeyboardInterrupt())
        else:
            self._discard()

    def _discard(self) -> None:
        if self._lock.is_held:
            self._lock.release()
            self._snapshot.restore()

    def update(self, **record: Any) -> None:
        """Add entries to run.json."""
        self.record |= record
        if not self.is_shared:
            self.record["shared_folder"] = False
        if not self._lock.is_inherited:
            self._write()

    def write_files(self, files: Mapping[str, bytes]) -> None:
        """Write further files, by their names relative to the folder. Raise SinkError as for run.json."""
        for name, content in files.items():
            file = self.path / name
            try:
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(content)
            except OSError as error:
                if self.on_error == "stop":
                    raise SinkError(f"{file} cannot be written: {error.strerror}") from error

    def finish(self, status: Status, error: BaseException | str | None = None) -> None:
        """Write the final status to run.json and release the lock, unless the run has ended.

        An exception that ended the run takes precedence over an error in writing run.json.
        """
        with uninterrupted():
            if not self._lock.is_held:
                return
            try:
                self.update(**final_entries(status, error))
            except SinkError:
                if not isinstance(error, BaseException):
                    raise
            finally:
                self._snapshot.remove_replaced()
                self._lock.release()

    def _write(self) -> None:
        """Write run.json. Raise SinkError if it cannot be written and `on_error` is `stop`."""
        try:
            with uninterrupted():
                write_json(self.path / "run.json", self.record)
        except OSError as error:
            if self.on_error == "stop":
                raise SinkError(f"{self.path / 'run.json'} cannot be written: {error.strerror}") from error


class WorkerRunFolder(RunFolder):
    """The folder of a run for all processes except rank 0. Rank 0 writes run.json.

    A machine that does not share the folder of rank 0 has a folder with the rows of its processes. Its run.json is a copy with
    the key `rank`: a process that writes there.

    Args:
        remote: The address to which this process uploads; None if it uploads nothing.

    Raises:
        ConfigError: Rank 0 was refused, or did not begin a run within 60 seconds, another process has the same rank, or the process shares
            neither the folder nor the remote address of rank 0.
    """

    def __init__(self, path: Path, rank: int, *, where: str = "hydra.run.dir", remote: str | None = None) -> None:
        self.path = path
        self._lock = FolderLock(path, rank)
        announcement = RunAnnouncement()
        begun = announcement.receive(RANK_0_TIMEOUT)
        if isinstance(begun, str):
            raise ConfigError(Problem(where, begun, given=str(path)))
        host, record = begun
        check_writable(path, where)
        if not self._lock.acquire():
            message = "another process with the same rank writes to this folder"
            raise ConfigError(Problem(where, message, given=str(path)))
        self._is_shared = announcement.check_shared(path, host, record)
        if not self.is_shared:
            self._refusals = (BaseException,)  # also that of rank 0
            self._snapshot = Snapshot(path)
            try:
                self._begin_separately(record, rank, where, remote)
            except ConfigError:
                self._discard()
                raise

    def _begin_separately(self, record: dict[str, Any], rank: int, where: str, remote: str | None) -> None:
        """Write the run.json of a separate folder, unless another process of this machine wrote it."""
        unseen = f"rank {rank} on {socket.gethostname()} does not see the folder of rank 0"
        if remote is None:
            option = f"set {REMOTE_KEY}=" if where == "hydra.run.dir" else "pass remote="
            fix = f"choose a folder that all machines share, or {option}'protocol://bucket/folder'"
            raise ConfigError(Problem(where, unseen, given=str(self.path), fix=fix))
        if remote != record["remote"]:
            message = f"{unseen}, and would upload to {remote}, rank 0 to {record['remote']}"
            fix = "choose folders that have the same path below `runs` on all machines"
            raise ConfigError(Problem(where, message, given=str(self.path), fix=fix))
        if every := record["config"].get("train", {}).get("checkpoint", {}).get("every"):
            message = f"{unseen}, and checkpoints require a common folder"
            fix = "choose a folder that all machines share, or set train.checkpoint.every=0"
            raise ConfigError(Problem("train.checkpoint.every", message, given=every, fix=fix))
        if not (self.path / "run.json").exists():
            with suppress(FileNotFoundError):  # another process wrote it at the same time
                write_json(self.path / "run.json", {**record, "shared_folder": False, "rank": rank})
        if read_record(self.path, where)["started"] != record["started"]:
            create_free_folder(self.path, where)  # raises an error, because of the other run

    @property
    def is_shared(self) -> bool:
        """Whether this process writes to the folder of rank 0."""
        return self._is_shared

    def _discard(self) -> None:
        self._lock.release()
        if not self.is_shared:
            self._snapshot.restore()
            with suppress(OSError):  # the folder contains other files
                self.path.rmdir()

    def update(self, **record: Any) -> None:
        """Do nothing, because rank 0 writes run.json."""

    def write_files(self, files: Mapping[str, bytes]) -> None:
        """Do nothing, because rank 0 writes the files."""

    def finish(self, status: Status, error: BaseException | str | None = None) -> None:
        """Release the lock, unless the run has ended. In a separate folder, write the final status.

        If rank 0 died before it wrote a final status, this process writes the failure to run.json.
        """
        with uninterrupted():
            if self._lock.is_held:
                if not self.is_shared:
                    end_if_running(self.path, **final_entries(status, error))
                elif isinstance(error, RankError) and error.rank == 0 and not is_locked(self.path):
                    end_if_running(self.path, **final_entries("failed", error), failed_rank=error.rank)
                self._lock.release()

    def _write(self) -> None:
        """Do nothing, because rank 0 writes run.json."""


def _interrupt_behind(error: BaseException | None) -> KeyboardInterrupt | None:
    """Return the interrupt that caused an error or during whose handling it was raised; None without one.

    If another process failed, torchrun interrupts this one: the failure is the cause.
    """
    while error is not None and not isinstance(error, KeyboardInterrupt | RankError):
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return error if isinstance(error, KeyboardInterrupt) else None
