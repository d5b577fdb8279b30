"""A run's folder on its way to a remote one: parts while the run goes on, the rest when it is over.

    run.json                            first, with the status `running`, and after every few parts
    stats/part-0000-000000.parquet      when it is closed; it never changes, so that one that is there is not sent again
    .hydra/, instrument.log, ...        at the end, and run.json last

What is in a journal is in no part yet, and stays where it is. Files are sent from disk by a thread of their own, so that no
step waits for it and no rows are kept in memory for it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..capture.tables import TABLES
from ..errors import ConfigError, Mistake
from .lock import LOCK
from .parts import JOURNALS, parts_of, written_parts
from .remote import CREDENTIALS, RemoteFolder, UploadError, folder_at, told

RECORD = "run.json"
LOOK = 1.0  # seconds between two looks at what has been closed
PATIENCE = 30.0  # seconds that the beginning of a run waits for the first answer
STALLED = 300.0  # seconds without a file sent, after which the end of a run waits no longer
ATTEMPTS = 3  # at one file, before the user is told, and at the end before it is left out
PAUSES = (1.0, 2.0, 5.0, 15.0, 60.0)  # seconds before the next attempt, the last one from then on
SMALL = 2**20  # bytes of a file that is compared by what it holds
REFUSALS = {  # errors that waiting does not help against, and what is allowed
    "FileNotFoundError": "a bucket, or a container, that exists",
    "PermissionError": CREDENTIALS,
    "NoCredentialsError": CREDENTIALS,
    "UploadError": "another address",
}
LASTING = ("checkpoints/",)  # besides parts, what is never written a second time under its name


@dataclass
class Sent:
    """What came of sending a run's files.

    Attributes:
        files: How many were sent.
        bytes: Of these.
        missing: Those that could not be sent, and why, in words.
    """

    files: int = 0
    bytes: int = 0
    missing: dict[str, str] = field(default_factory=dict)


def files_of(folder: Path) -> Iterator[str]:
    """The files of a run that are sent, run.json last: all but journals, the lock, and what is half-done."""
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        if (
            file.is_file()
            and name != RECORD
            and not name.startswith((LOCK, f"{JOURNALS}/"))
            and not name.endswith(".tmp")
        ):
            yield name
    yield RECORD


def closed_parts(folder: Path, rank: int | None = None) -> Iterator[Path]:
    """The parts of all tables, or those that one process wrote."""
    for table in TABLES:
        yield from (file for part, file in parts_of(folder, table).items() if rank in (None, part.rank))


def is_of(folder: Path, remote: RemoteFolder) -> bool | None:
    """Whether a remote folder holds the very run that a folder holds; None where it holds none."""
    found = remote.read(RECORD)
    if found is None:
        return None
    with suppress(OSError, ValueError, AttributeError):
        ours, theirs = json.loads((folder / RECORD).read_text()), json.loads(found)
        return all(ours.get(key) == theirs.get(key) for key in ("started", "config_hash", "seed"))
    return False


def refuse_other_run(folder: Path, remote: RemoteFolder) -> None:
    """Make sure that a remote folder is empty, or holds this very run.

    Raises:
        UploadError: It holds another one.
    """
    if is_of(folder, remote) is False:
        raise UploadError(f"{remote.address} holds another run already, and none is ever overwritten")


def send_all(folder: Path, remote: RemoteFolder, sent: Sent | None = None) -> Sent:
    """Send whatever is not there yet.

    Args:
        folder: The run's.
        remote: Where to.
        sent: Added to while it goes on.

    Raises:
        UploadError: The remote folder holds another run.
        Exception: Of many kinds: it cannot be reached at all.
    """
    sent = Sent() if sent is None else sent
    refuse_other_run(folder, remote)
    there = remote.sizes()
    parts = {file.relative_to(folder).as_posix() for file in closed_parts(folder)}
    sent.missing.clear()
    failed = 0
    for name in files_of(folder):
        try:
            size = (folder / name).stat().st_size
            if name in parts and there.get(name, size) != size:
                sent.missing[name] = f"there is a file of {there[name]:,} bytes already, and this one has {size:,}"
            if name in there and (name in parts or _is_same(folder / name, size, remote, name, there[name])):
                continue
            if failed < ATTEMPTS:
                _put(folder, remote, name)
            else:
                raise ConnectionError("not tried any more")
        except Exception as error:
            failed += 1
            sent.missing[name] = told(error)
        else:
            sent.files, sent.bytes = sent.files + 1, sent.bytes + size
    if not sent.missing:
        remote.sizes()  # as it is by now
        remove_merged(remote)
    return sent


def remove_merged(remote: RemoteFolder) -> None:
    """Remove the parts there whose rows are in a merged one there.

    Raises:
        Exception: Of many kinds: it cannot be reached.
    """
    folder = folder_at(remote.address)
    for table in TABLES:
        for part in written_parts(folder, table).keys() - parts_of(folder, table).keys():
            remote.remove(f"{table}/{part.file(folder, table).name}")


def remove_sent(folder: Path, remote: RemoteFolder, rank: int | None = None) -> None:
    """Remove the parts that are there as a whole; of one process, or of all.

    Raises:
        Exception: Of many kinds: it cannot be reached.
    """
    there = remote.sizes()
    for file in closed_parts(folder, rank):
        if there.get(file.relative_to(folder).as_posix()) == file.stat().st_size:
            file.unlink()


def _is_same(file: Path, size: int, remote: RemoteFolder, name: str, there: int) -> bool:
    """Whether a file need not be sent again; of a large one that may be written anew under its name nothing is known."""
    if size != there:
        return False
    return name.startswith(LASTING) or (size <= SMALL and file.read_bytes() == remote.read(name))


def _put(folder: Path, remote: RemoteFolder, name: str) -> None:
    for attempt in range(ATTEMPTS):
        try:
            return remote.put(folder / name, name)
        except Exception:
            if attempt == ATTEMPTS - 1:
                raise
            time.sleep(_pause(attempt + 1))
    return None


def _pause(failures: int) -> float:
    """Seconds before the next attempt."""
    return PAUSES[min(failures, len(PAUSES)) - 1]


def take_back(remote: RemoteFolder, rank: int, counts: Mapping[str, int]) -> None:
    """Take away what `instrument.sinks.parts.rewind` takes away here: the parts of one process after so many of each table.

    Raises:
        Exception: Of many kinds: it cannot be reached.
    """
    folder = folder_at(remote.address)
    for table, count in counts.items():
        for part, file in written_parts(folder, table).items():
            if part.rank == rank and part.number >= count:
                remote.remove(f"{table}/{file.name}")
            elif part.rank == rank and part.end > count:
                raise UploadError(
                    f"{file} holds rows of before and after the checkpoint: it was merged for another one"
                )


class Upload:
    """Sends a run's closed parts while it goes on, and all the rest at the end.

    Args:
        folder: The run's.
        remote: Where to.
        rank: The process whose parts are sent; that of rank 0 sends run.json too, and everything at the end.
        keep_local: Whether parts that were sent stay here too.
    """

    def __init__(self, folder: Path, remote: RemoteFolder, *, rank: int, keep_local: bool = True) -> None:
        self.folder = folder
        self.remote = remote
        self.rank = rank
        self.keep_local = keep_local
        self.sent = Sent()
        self._there: set[Path] | None = None  # parts that need not be sent; None before the first answer
        self._looked: dict[Path, int] = {}  # the tables' folders as they were at the last look
        self._messages: deque[str] = deque()
        self._refused: Exception | None = None
        self._answered, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)

    def begin(self) -> None:
        """Send run.json, and wait a little for the answer; where there is none it is tried again while the run goes on.

        Raises:
            ConfigError: There is an answer, and nothing may be written there.
        """
        self._thread.start()
        if not self._answered.wait(PATIENCE):
            self._messages.append(f"{self.remote.address} has not answered for {PATIENCE:.0f} s; it is tried again")
        if self._refused is not None:
            problem = f"this place cannot be written: {told(self._refused)}"
            allowed = REFUSALS[type(self._refused).__name__]
            raise ConfigError(Mistake(self.remote.where, problem, written=self.remote.address, allowed=allowed))

    @property
    def is_refused(self) -> bool:
        """Whether nothing may be written there."""
        return self._refused is not None

    def messages(self) -> list[str]:
        """What has gone wrong, or right again, since this was asked last."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def end(self) -> Sent:
        """Send what is left, wait for it as long as it gets on, and tell what came of it."""
        self._over.set()
        before, since = self.sent.files, time.monotonic()
        while self._thread.is_alive() and time.monotonic() - since < STALLED:
            self._thread.join(LOOK)
            if self.sent.files != before:
                before, since = self.sent.files, time.monotonic()
        if self._thread.is_alive():
            self.sent.missing[""] = f"nothing could be sent for {STALLED:.0f} s"
        return self.sent

    def _work(self) -> None:
        self._follow()
        if self._refused is not None:
            return
        try:
            if self.rank == 0:
                send_all(self.folder, self.remote, self.sent)
            else:
                self._send_own()
            if not self.keep_local:
                remove_sent(self.folder, self.remote, self.rank or None)
        except Exception as error:
            self.sent.missing[""] = told(error)

    def _send_own(self) -> None:
        """Send what this process has closed at the end; the first one may have been there before."""
        for file in closed_parts(self.folder, self.rank):
            if self._there is None or file not in self._there:
                _put(self.folder, self.remote, file.relative_to(self.folder).as_posix())

    def _follow(self) -> None:
        """Send what is closed, again and again, until the run is over or something else is found there."""
        failures, lost = 0, False
        while not self._over.is_set():
            try:
                self._look()
            except Exception as error:
                failures += 1
                if self._there is None and type(error).__name__ in REFUSALS:
                    self._refused = error
                if not lost and (self._refused or failures >= ATTEMPTS or not self._answered.is_set()):
                    lost = True
                    goes_on = "nothing is sent" if self._refused else "it is tried again"
                    self._messages.append(f"{self.remote.address}: {told(error)}; {goes_on}, all is in {self.folder}")
            else:
                if lost:
                    self._messages.append(f"{self.remote.address} is reached again")
                failures, lost = 0, False
            self._answered.set()
            if self._refused is not None:
                return
            self._over.wait(_pause(failures) if failures else LOOK)

    def _look(self) -> None:
        """Send what has been closed since the last look."""
        if self._there is None:
            if self.rank == 0:
                refuse_other_run(self.folder, self.remote)
                self.remote.put(self.folder / RECORD, RECORD)
            self._there = {self.folder / name for name in self.remote.sizes()}
        before = self.sent.files
        for file in self._unseen():
            if file not in self._there and not self._over.is_set():
                self.remote.put(file, file.relative_to(self.folder).as_posix())
                self._there.add(file)
                self.sent.files, self.sent.bytes = self.sent.files + 1, self.sent.bytes + file.stat().st_size
        if self.sent.files == before:
            return
        if self.rank == 0:
            self.remote.put(self.folder / RECORD, RECORD)  # its time there is the run's last sign of life
        if not self.keep_local:
            remove_sent(self.folder, self.remote, self.rank)

    def _unseen(self) -> Iterator[Path]:
        """The parts in those tables' folders that have changed since all of their parts were sent."""
        for table in TABLES:
            place = self.folder / table
            with suppress(FileNotFoundError):
                changed = place.stat().st_mtime_ns
                if self._looked.get(place) != changed:
                    yield from (file for part, file in parts_of(self.folder, table).items() if part.rank == self.rank)
                    self._looked[place] = changed
