"""Messages to a run in progress: files in its folder. The run answers each and keeps a log of the changes that it made.

    control/1732345678901234567-4711.json   a message: a list of changes, see `instrument.config.run_changes`
    control/1732345678901234567-4711.done   the answer
    control/changes.jsonl                   for each message, the number of completed steps and the changes

A message is written under a temporary name and renamed, so that it is never read incompletely. The folder belongs to the user
who runs the run, and only this user can write to it.
"""

from __future__ import annotations

import json
import math
import os
import stat
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..config.run_changes import Settings, parse_changes
from ..errors import ConfigError, InstrumentError, Problem
from .lock import is_locked
from .remote_folder import check_is_local
from .run_record import read_record, write_json

CONTROL = "control"
LOG = "changes.jsonl"
MESSAGE, ANSWER = ".json", ".done"
MAX_BYTES = 64 * 2**10
OTHERS_CAN_WRITE = stat.S_IWGRP | stat.S_IWOTH
POLL_SECONDS = 0.05  # between two reads of an answer
LONG_SECONDS = 2.0  # after which the sender of a message prints that it waits


class MessageError(Exception):
    """A message that cannot be accepted. The text says why."""


@dataclass(frozen=True)
class Answer:
    """The answer of a run to a message: the number of completed steps, and the changes, or why they were refused."""

    step: int
    changes: list[str] = field(default_factory=list)
    problem: str | None = None


def send(folder: Path, changes: Sequence[str]) -> Path:
    """Send changes to a run. Return the file of the message, for `answer_to`."""
    control = folder / CONTROL
    control.mkdir(mode=0o700, exist_ok=True)
    message = control / f"{time.time_ns()}-{os.getpid()}{MESSAGE}"
    write_json(message, list(changes))
    return message


def answer_to(message: Path) -> Answer | None:
    """Return the answer to a message; None if the run has not read it yet."""
    try:
        return Answer(**json.loads(message.with_suffix(ANSWER).read_text()))
    except FileNotFoundError:
        return None


class ControlFolder:
    """The messages to a run, as seen by the run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / CONTROL
        self._path = str(self.folder)

    def messages(self) -> list[Path]:
        """Return the files of new messages in order. Raise a MessageError unless only the user of the run can write to the folder."""
        if not os.access(self._path, os.F_OK):  # without an exception, which is slower
            return []
        try:
            about = os.lstat(self._path)
        except OSError:
            return []
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & OTHERS_CAN_WRITE:
            raise MessageError(f"{self.folder} is not a folder to which only the user of the run can write")
        try:
            return sorted(file for file in self.folder.iterdir() if file.suffix == MESSAGE)
        except OSError as error:
            raise MessageError(f"{self.folder} cannot be read: {error.strerror}") from None

    def read(self, message: Path) -> list[str]:
        """Return the changes of a message. Raise a FileNotFoundError if it was withdrawn, and a MessageError if it cannot be accepted."""
        try:
            descriptor = os.open(message, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise MessageError(f"it cannot be opened: {error.strerror}") from None
        with os.fdopen(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise MessageError("it is not a regular file")
            if about.st_uid != os.geteuid():
                raise MessageError("it was written by another user")
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise MessageError(f"it has more than {MAX_BYTES:,} bytes")
        try:
            changes = json.loads(content)
        except (ValueError, RecursionError):
            raise MessageError("it is not JSON") from None
        if not isinstance(changes, list) or not all(isinstance(change, str) for change in changes):
            raise MessageError("it is not a list of strings")
        return changes

    def answer(self, message: Path, answer: Answer) -> None:
        """Answer a message and remove it."""
        write_json(message.with_suffix(ANSWER), asdict(answer))
        message.unlink(missing_ok=True)

    def record(self, step: int, changes: Sequence[str]) -> None:
        """Add changes to the log, so that a resumed run makes them again."""
        entry = json.dumps({"step": step, "changes": list(changes)}) + "\n"
        with (self.folder / LOG).open("a+b") as log:
            if log.tell():
                log.seek(-1, os.SEEK_END)
                if log.read(1) != b"\n":  # the process was killed while it wrote the last line
                    entry = "\n" + entry
            log.write(entry.encode())

    def remove_log(self) -> None:
        """Remove the log of an earlier run in the same folder."""
        (self.folder / LOG).unlink(missing_ok=True)

    def recorded(self) -> list[tuple[int, list[str]]]:
        """Return the logged changes with the number of completed steps, in order, without an incomplete line of a killed process."""
        changes = []
        with suppress(FileNotFoundError):
            for line in (self.folder / LOG).read_text().splitlines():
                with suppress(ValueError, TypeError, KeyError):
                    entry = json.loads(line)
                    changes.append((int(entry["step"]), list(entry["changes"])))
        return sorted(changes, key=lambda entry: entry[0])


def request_changes(
    run: str, changes: Sequence[str], on_long_wait: Callable[[], None] = lambda: None, *, seconds: float = math.inf
) -> Answer:
    """Send changes to a run and wait for its answer.

    Args:
        changes: The changes, see `instrument.config.run_changes.parse_changes`.
        on_long_wait: Called once if the current step takes more than two seconds. Default: nothing is called.
        seconds: The time after which the changes are withdrawn. Default: no limit.

    Raises:
        ConfigError: A change is invalid, or the folder contains no run that takes changes.
        InstrumentError: The run is not in progress, belongs to another user, or ended before it read the message, or the time
            is over.
    """
    from .run_files import RunFiles  # Imported late: it imports pandas, which a run needs only at its end.

    check_is_local(run, "RUN", "a run can only be changed in its local folder", fix="run this command on its machine")
    folder = Path(run)
    read_record(folder, "RUN")
    info = RunFiles(folder).info()
    if info["status"] != "running":
        raise InstrumentError(f"{folder} is not in progress: its status is {info['status']}")
    settings = Settings.of(info.get("config") or {})
    if settings.has_custom_loop and info.get("ranks", 1) > 1:
        problem = "a custom training loop with several processes cannot be changed"
        raise ConfigError(Problem("RUN", problem, run, "a run of python -m instrument, or a loop in one process"))
    for _, made in ControlFolder(folder).recorded():
        settings = parse_changes(made, settings).settings
    parse_changes(changes, settings)
    try:
        if (folder / "run.json").stat().st_uid != os.geteuid():
            raise InstrumentError(f"{folder} belongs to another user, and only its owner can change the run")
        message = send(folder, changes)
    except OSError as error:
        raise InstrumentError(f"{folder} cannot be written: {error.strerror}") from None
    began, has_called = time.monotonic(), False
    try:
        while (answer := answer_to(message)) is None:
            if not is_locked(folder) and answer_to(message) is None:
                raise InstrumentError(f"{folder}: the run ended before it read the message")
            if not has_called and time.monotonic() - began > LONG_SECONDS:
                has_called = True
                on_long_wait()
            if time.monotonic() - began > seconds:
                raise InstrumentError(f"the step did not end within {seconds:g} seconds: nothing was changed")
            time.sleep(POLL_SECONDS)
        return answer
    finally:
        for suffix in (MESSAGE, ANSWER):
            message.with_suffix(suffix).unlink(missing_ok=True)
