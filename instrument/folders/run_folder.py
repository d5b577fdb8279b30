"""The folder of a run, its lock and its run.json."""

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

CHECKPOINTS = "checkpoints"  # Subfolder of the run folder.
PATIENCE = 60.0  # Seconds that the other processes of a run wait for rank 0.
Status = Literal["running", "done", "failed", "interrupted", "killed"]
# Subfolder of a sweep with the previous attempts of repeated jobs: 3.1, 3.2, ... for job 3.
ASIDE = ".aside"
PACKAGES = ("instrument", "torch", "torchvision", "numpy", "pyarrow", "pandas", "hydra-core", "omegaconf", "pydantic")


def refuse_taken(folder: Path, where: str) -> None:
    """Check that a new run can use a folder. A run never overwrites another run.

    Args:
        folder: The folder of the new run. It is created if it does not exist.
        where: The configuration key of the folder, for error messages.

    Raises:
        ConfigError: The folder contains a run, is a remote address, or cannot be created or written.
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
        probe.unlink(missing_ok=True)  # Another process may check the same folder at the same time.
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
    """Check that a run is resumed with the same number of processes.

    Args:
        path: The folder of the run.
        ranks: The number of processes now.

    Raises:
        ConfigError: The number is different, or the folder contains no run.
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
    """The folder of a new run. This process holds its lock and writes its run.json.

    Args:
        path: The folder.
        where: The configuration key of the folder, for error messages. Default: `hydra.run.dir`.
        on_error: `stop` (default) raises an error if run.json cannot be written; `continue` ignores the error.
        record: The entries of run.json. The file is written again after each change.

    Attributes:
        path: The folder.
        record: The content of run.json.

    Raises:
        ConfigError: The folder contains a run, another process has just started a run there, or it cannot be written.
        SinkError: From all methods: run.json cannot be written.
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
            refuse_taken(path, where)  # A run may have started and ended since the first check.
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
        """Open the folder of a stopped run, to resume the run.

        Args:
            path: The folder.
            on_error: See `RunFolder`.

        Raises:
            ConfigError: The folder contains no run, the run is complete, or a process still writes to the folder.
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
        """Write to run.json how the block ended: `done`, `interrupted` or `failed`. Then release the lock.

        Args:
            is_begun: Returns whether training has begun. If a configuration error occurs earlier, the folder is
                restored to its previous content.
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
        """Add entries to run.json."""
        self.record |= record
        self._write()

    def finish(self, status: Status, error: BaseException | None = None) -> None:
        """Write the final status to run.json and release the lock.

        Args:
            status: The final status.
            error: The exception that ended the run. It takes precedence over an error in writing run.json. Default:
                None.
        """
        try:
            self.update(**ending(status, error))
        except SinkError:
            if error is None:
                raise
        finally:
            self._lock.release()

    def _write(self) -> None:
        """Write run.json.

        Raises:
            SinkError: The file cannot be written, and `on_error` is `stop`.
        """
        try:
            write_json(self.path / "run.json", self.record)
        except OSError as error:
            if self.on_error == "stop":
                raise SinkError(f"{self.path / 'run.json'} cannot be written: {error.strerror}") from error


class JoinedFolder:
    """The folder of a run for all processes except rank 0. Rank 0 writes run.json.

    Args:
        path: The folder.
        rank: The rank of this process, at least 1.
        where: The configuration key of the folder, for error messages. Default: `hydra.run.dir`.

    Raises:
        ConfigError: Rank 0 did not begin a run in the folder within 60 seconds, or another process has the same rank.
    """

    def __init__(self, path: Path, rank: int, *, where: str = "hydra.run.dir") -> None:
        self.path = path
        self._lock = FolderLock(path, rank)
        deadline = time.monotonic() + PATIENCE
        while not is_locked(path):  # Rank 0 locks the folder, after it checked that it contains no other run.
            if time.monotonic() > deadline:
                problem = f"the first process has begun no run in this folder within {PATIENCE:.0f} seconds"
                raise ConfigError(Mistake(where, problem, written=str(path)))
            time.sleep(0.05)
        if not self._lock.acquire():
            raise ConfigError(Mistake(where, "another process of this rank writes to this folder", written=str(path)))

    @contextmanager
    def recording(self, is_begun: Callable[[], bool]) -> Iterator[None]:  # noqa: ARG002
        """Release the lock at the end of the block.

        If rank 0 died before it wrote a final status, this method writes the failure to run.json.

        Args:
            is_begun: Ignored; see `RunFolder.recording`.
        """
        try:
            yield
        except RankError as error:
            if error.rank == 0 and not is_locked(self.path):
                self._record_failure(error)
            raise
        finally:
            self._lock.release()

    def update(self, **record: Any) -> None:
        """Do nothing, because rank 0 writes run.json."""

    def _record_failure(self, error: RankError) -> None:
        """Write the failure of rank 0 to run.json, if the status is still `running`."""
        record = json.loads((self.path / "run.json").read_text())
        if record["status"] == "running":
            with suppress(FileNotFoundError):  # Another process wrote the file at the same time.
                write_json(self.path / "run.json", {**record, **ending("failed", error), "failed_rank": error.rank})


def ending(status: Status, error: BaseException | None) -> dict[str, Any]:
    """Return the entries of run.json at the end of a run.

    Args:
        status: The final status.
        error: The exception that ended the run; None without one.
    """
    told = None if error is None else f"{type(error).__name__}: {error}"
    return {"status": status, "ended": datetime.now(UTC).isoformat(timespec="seconds"), "error": told}


def read_record(path: Path, where: str) -> dict[str, Any]:
    """Read the run.json of a folder.

    Args:
        path: The folder of the run.
        where: The configuration key of the folder, for error messages.

    Raises:
        ConfigError: The file does not exist, is not JSON, or was not written by this package.
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
    """Set the status in run.json to `killed`, if it is `running`. Call it only if the process of the run is gone.

    Args:
        folder: The folder of the run.
    """
    path = folder / "run.json"
    record = None
    with suppress(ValueError):  # The file is damaged; `load` reports it.
        record = json.loads(path.read_text())
    if isinstance(record, dict) and record.get("status") == "running":
        write_json(path, {**record, "status": "killed"})


def write_json(path: Path, record: dict[str, Any]) -> None:
    """Write a JSON file atomically: the previous file remains until the new one is complete.

    Args:
        path: The file.
        record: Its content.
    """
    aside = path.with_name(f".{path.name}.tmp")
    aside.write_text(json.dumps(record, indent=2, default=str) + "\n")
    os.replace(aside, path)


def config_hash(config: dict[str, Any]) -> str:
    """Return the first 16 hexadecimal digits of the SHA-256 of a configuration, independent of the order of keys."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]


def git_revision() -> str | None:
    """Return the commit of the working directory; None outside a git checkout.

    The suffix `-dirty` marks uncommitted changes.
    """
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
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
