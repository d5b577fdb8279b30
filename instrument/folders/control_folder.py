"""Messages to a run in progress: files in its folder. The run answers each and keeps a log of the changes that it made.

    control/1732345678901234567-4711.json   a message: a list of changes, see `instrument.spec.run_changes`
    control/1732345678901234567-4711.done   the answer
    control/changes.jsonl                   for each message, the number of completed steps and the changes

A message is written under a temporary name and renamed, so that it is never read incompletely. The folder belongs to the user
who runs the run, and only this user can write to it.
"""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from .run_record import write_json

CONTROL = "control"
LOG = "changes.jsonl"
MESSAGE, ANSWER = ".json", ".done"
MOST_BYTES = 64 * 2**10
OTHERS_CAN_WRITE = stat.S_IWGRP | stat.S_IWOTH
CLOCK_SECONDS = 1.0  # resolution of the modification time of a folder, with a margin


class MessageError(Exception):
    """A message that cannot be accepted. The text says why."""


@dataclass(frozen=True)
class Answer:
    """The answer of a run to a message.

    Attributes:
        step: The number of completed steps when the message was read.
        changes: Descriptions of the changes.
        problem: Why the message was refused; None if the changes were made.
    """

    step: int
    changes: list[str] = field(default_factory=list)
    problem: str | None = None


def send(folder: Path, changes: Sequence[str]) -> Path:
    """Send changes to a run.

    Args:
        folder: The folder of the run.
        changes: The changes.

    Returns:
        The file of the message, for `answer_to`.

    Raises:
        OSError: The folder is not writable.
    """
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


def withdraw(message: Path) -> None:
    """Remove a message that the run has not read, or the answer to it."""
    for suffix in (MESSAGE, ANSWER):
        with suppress(FileNotFoundError):
            message.with_suffix(suffix).unlink()


class ControlFolder:
    """The messages to a run, as seen by the run.

    Args:
        folder: The folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder / CONTROL
        self._listed: tuple[int, float] | None = None  # modification time of the folder, and when it was listed

    def messages(self) -> list[Path]:
        """Return the files of new messages in order. Without a message, this costs one call of the system.

        Raises:
            MessageError: The folder is a link, belongs to another user, or other users can write to it.
        """
        try:
            about = os.lstat(self.folder)
        except OSError:
            return []
        changed = about.st_mtime_ns
        # A file that appears after the listing can leave the same modification time.
        if self._listed is not None and self._listed[0] == changed and self._listed[1] > changed / 1e9 + CLOCK_SECONDS:
            return []
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.geteuid() or about.st_mode & OTHERS_CAN_WRITE:
            raise MessageError(f"{self.folder} is not a folder to which only the user of the run can write")
        listed_at = time.time()
        try:
            found = sorted(file for file in self.folder.iterdir() if file.suffix == MESSAGE)
        except OSError as error:
            raise MessageError(f"{self.folder} cannot be read: {error.strerror}") from None
        self._listed = changed, listed_at
        return found

    def read(self, message: Path) -> list[str]:
        """Return the changes of a message.

        Raises:
            FileNotFoundError: The sender has withdrawn it.
            MessageError: Another user wrote it, it is no regular file, it is too large, or it is malformed.
        """
        try:
            descriptor = os.open(message, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise MessageError(f"it cannot be opened: {error.strerror}") from None
        with os.fdopen(descriptor, "rb") as file:
            about = os.fstat(descriptor)
            if not stat.S_ISREG(about.st_mode):
                raise MessageError("it is no regular file")
            if about.st_uid != os.geteuid():
                raise MessageError("it was written by another user")
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise MessageError(f"it has more than {MOST_BYTES:,} bytes")
        try:
            changes = json.loads(content)
        except (ValueError, RecursionError):
            raise MessageError("it is no JSON") from None
        if not isinstance(changes, list) or not all(isinstance(change, str) for change in changes):
            raise MessageError("it is no list of strings")
        return changes

    def answer(self, message: Path, answer: Answer) -> None:
        """Answer a message and remove it."""
        write_json(message.with_suffix(ANSWER), asdict(answer))
        message.unlink(missing_ok=True)

    def record(self, step: int, changes: Sequence[str]) -> None:
        """Add changes to the log, so that a resumed run makes them again.

        Raises:
            OSError: The log cannot be written.
        """
        entry = json.dumps({"step": step, "changes": list(changes)}) + "\n"
        with (self.folder / LOG).open("a+b") as log:
            if log.tell():
                log.seek(-1, os.SEEK_END)
                if log.read(1) != b"\n":  # the process was killed while it wrote the last line
                    entry = "\n" + entry
            log.write(entry.encode())

    def remove_log(self) -> None:
        """Remove the log of an earlier run in the same folder.

        Raises:
            OSError: It cannot be removed.
        """
        (self.folder / LOG).unlink(missing_ok=True)

    def recorded(self) -> list[tuple[int, list[str]]]:
        """Return the logged changes with the number of completed steps, in the order of the steps.

        An incomplete line, from a process that was killed, is ignored.
        """
        found = []
        with suppress(FileNotFoundError):
            for line in (self.folder / LOG).read_text().splitlines():
                with suppress(ValueError, TypeError, KeyError):
                    entry = json.loads(line)
                    found.append((int(entry["step"]), list(entry["changes"])))
        return sorted(found, key=lambda entry: entry[0])
