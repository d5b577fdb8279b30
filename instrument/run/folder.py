"""The folder of a run and its run.json."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from ..errors import ConfigError, Mistake, RankError, SinkError
from ..sinks.lock import FolderLock, is_locked
from ..sinks.remote import refuse_address
from .snapshot import Snapshot

CHECKPOINTS = "checkpoints"  # the folder of a run's checkpoints, in its own
PATIENCE = 60.0  # seconds that the processes of a run wait for the first one
Status = Literal["running", "done", "failed", "interrupted", "killed"]
ASIDE = ".aside"  # beside a sweep's jobs: what is left of those that are done again, as 3.1, 3.2, ... of job 3
PACKAGES = ("instrument", "torch", "torchvision", "numpy", "pyarrow", "pandas", "hydra-core", "omegaconf", "pydantic")


def refuse_taken(folder: Path, where: str) -> None:
    """A run is never written over another one, nor where nothing can be written.

    Args:
        folder: Where the run is to be.
        where: What the user says it by.

    Raises:
        ConfigError: The folder holds a run, is an address, or cannot be made or written.
    """
    refuse_address(folder, where)
    if (folder / "run.json").exists():
        raise ConfigError(
            Mistake(
                where,
                "there is a run in this folder already, and none is ever overwritten",
                written=str(folder),
            )
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink(missing_ok=True)  # another process may try the same folder at the same moment
    except OSError as error:
        raise ConfigError(
            Mistake(
                where,
                f"this folder cannot be written: {error.strerror}",
                written=str(folder),
                allowed=f"{where}=FOLDER, one that you may write to",
            )
        ) from None


def refuse_other_count(path: Path, ranks: int) -> None:
    """A run goes on with as many processes as there were.

    Raises:
        ConfigError: There are more, or fewer; or there is no run.
    """
    before = read_record(path, "resume").get("ranks", 1)
    if before != ranks:
        many, torchrun = (
            ("one process", "") if before == 1 else (f"{before} processes", f"torchrun --nproc-per-node {before} ")
        )
        problem = f"this run was begun by {many}, and goes on with as many; this time it is {ranks}"
        allowed = f"{torchrun or 'python '}-m instrument resume={path}"
        raise ConfigError(Mistake("resume", problem, written=str(path), allowed=allowed))


class RunFolder:
    """A new folder for one run.

    Args:
        path: The folder.
        where: What the user says it by.
        on_error: What becomes of an error in writing run.json: `stop` raises it, `continue` goes on without it.
        record: What run.json says; it is written anew at every change.

    Raises:
        ConfigError: The folder holds a run, another process has just begun one there, or it cannot be written.
        SinkError: From all methods: run.json cannot be written any more.
    """

    def __init__(
        self,
        path: Path,
        *,
        where: str = "hydra.run.dir",
        on_error: Literal["stop", "continue"] = "stop",
        **record: Any,
    ) -> None:
        self._before = Snapshot.take(path)
        refuse_taken(path, where)
        self.path = path
        self.on_error = on_error
        self._lock = FolderLock(path)
        if not self._lock.acquire():
            raise ConfigError(Mistake(where, "another process has just begun a run in this folder", written=str(path)))
        try:
            refuse_taken(path, where)  # it may have ended by now too
        except ConfigError:
            self._lock.release()
            raise
        self.record: dict[str, Any] = {
            "status": "running",
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
            "ended": None,
            "error": None,
            **record,
            "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
            "git_revision": git_revision(),
            "command": sys.argv,
        }
        self._write()

    @classmethod
    def again(cls, path: Path, *, on_error: Literal["stop", "continue"] = "stop") -> RunFolder:
        """The folder of a run that was stopped, to go on with it.

        Raises:
            ConfigError: There is no run, it is done, or a process still writes to it.
        """
        record = read_record(path, "resume")
        if record["status"] == "done":
            raise ConfigError(Mistake("resume", "this run is done: there is nothing left to do", written=str(path)))
        place = cls.__new__(cls)
        place.path, place.on_error = path, on_error
        place._before = Snapshot.take(path)
        place._lock = FolderLock(path)
        if not place._lock.acquire():
            raise ConfigError(Mistake("resume", "this run is still running, in another process", written=str(path)))
        now = datetime.now(UTC).isoformat(timespec="seconds")
        resumed = [*record.get("resumed", []), {"at": now, "command": sys.argv}]
        record.pop("failed_rank", None)
        place.record = {**record, "status": "running", "ended": None, "error": None, "resumed": resumed}
        place._write()
        return place

    @contextmanager
    def recording(self, is_begun: Callable[[], bool]) -> Iterator[None]:
        """Say in the record how the block inside ended: done, interrupted or failed.

        Args:
            is_begun: Whether the run has been accepted. A configuration error before that leaves the folder as it was.
        """
        try:
            yield
        except KeyboardInterrupt as interrupt:
            self.finish("interrupted", interrupt)
            raise
        except ConfigError as error:
            if is_begun():
                self.finish("failed", error)
            else:
                self._lock.release()
                self._before.restore()
            raise
        except BaseException as error:
            self.finish("failed", error)
            raise
        self.finish("done")

    def update(self, **record: Any) -> None:
        """Add to the record."""
        self.record |= record
        self._write()

    def finish(self, status: Status, error: BaseException | None = None) -> None:
        """The run is over. That an error cannot be written down does not take the error's place."""
        try:
            self.update(**ending(status, error))
        except SinkError:
            if error is None:
                raise
        finally:
            self._lock.release()

    def _write(self) -> None:
        try:
            write_json(self.path / "run.json", self.record)
        except OSError as error:
            if self.on_error == "stop":
                raise SinkError(f"{self.path / 'run.json'} cannot be written: {error.strerror}") from error


class JoinedFolder:
    """The folder of a run that several processes write to, in one that does not keep the record.

    Args:
        path: The folder.
        rank: Which of the processes this is.
        where: What the user says the folder by.

    Raises:
        ConfigError: The first process does not begin a run there.
    """

    def __init__(self, path: Path, rank: int, *, where: str = "hydra.run.dir") -> None:
        self.path = path
        self._lock = FolderLock(path, rank)
        deadline = time.monotonic() + PATIENCE
        while not is_locked(path):  # by the first process, which refuses a folder that holds another run
            if time.monotonic() > deadline:
                problem = f"the first process has begun no run in this folder within {PATIENCE:.0f} seconds"
                raise ConfigError(Mistake(where, problem, written=str(path)))
            time.sleep(0.05)
        if not self._lock.acquire():
            raise ConfigError(Mistake(where, "another process of this rank writes to this folder", written=str(path)))

    @contextmanager
    def recording(self, is_begun: Callable[[], bool]) -> Iterator[None]:  # noqa: ARG002
        """Let go of the folder at the end. Where the process that keeps the record has died, say so in its place."""
        try:
            yield
        except RankError as error:
            if error.rank == 0 and not is_locked(self.path):
                self._record_failure(error)
            raise
        finally:
            self._lock.release()

    def update(self, **record: Any) -> None:
        """Nothing: the first process keeps the record."""

    def _record_failure(self, error: RankError) -> None:
        record = json.loads((self.path / "run.json").read_text())
        if record["status"] == "running":
            with suppress(FileNotFoundError):  # another survivor was faster
                write_json(self.path / "run.json", {**record, **ending("failed", error), "failed_rank": error.rank})


def ending(status: Status, error: BaseException | None) -> dict[str, Any]:
    """What the record says of the end of a run."""
    told = None if error is None else f"{type(error).__name__}: {error}"
    return {"status": status, "ended": datetime.now(UTC).isoformat(timespec="seconds"), "error": told}


def read_record(path: Path, where: str) -> dict[str, Any]:
    """The run.json of a folder.

    Raises:
        ConfigError: There is none, or it is not one.
    """
    try:
        record = json.loads((path / "run.json").read_text())
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            Mistake(where, f"its run.json cannot be read: {reason}", written=str(path), allowed="the folder of a run")
        ) from None
    if not isinstance(record, dict) or not isinstance(record.get("config"), dict) or "status" not in record:
        raise ConfigError(Mistake(where, "its run.json is not one of a run of ours", written=str(path)))
    return record


def mark_killed(folder: Path) -> None:
    """Say in the run.json of a run whose process is gone that it was killed, where it does not say how it ended."""
    path = folder / "run.json"
    record = None
    with suppress(ValueError):  # it is damaged: whoever loads the run says so
        record = json.loads(path.read_text())
    if isinstance(record, dict) and record.get("status") == "running":
        write_json(path, {**record, "status": "killed"})


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Put a record in the place of another one, which is there until the new one is whole."""
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(json.dumps(record, indent=2, default=str) + "\n")
    os.replace(aside, path)


def config_hash(config: dict[str, Any]) -> str:
    """The first 16 hexadecimal digits of the SHA-256 of a configuration, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]


def git_revision() -> str | None:
    """The commit of the working directory, with `-dirty` where it has changes; None outside a checkout."""
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
