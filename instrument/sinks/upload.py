"""A run's folder on its way to a remote one, by a thread: parts while the run goes on, the rest when it is over.

    run.json                            first, with the status `running`, and after every few parts
    stats/part-0000-000000.parquet      when it is closed
    .hydra/, instrument.log, ...        at the end, and run.json last

No step waits for it, and no rows are kept in memory for it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from ..capture.tables import TABLES
from ..errors import ConfigError, Mistake
from .client_errors import refusal, told
from .parts import parts_of
from .remote import RemoteFolder, UploadError
from .sending import ATTEMPTS, RECORD, Sent, closed_parts, pause_after, put, refuse_other_run, remove_sent, send_all

LOOK = 1.0  # seconds between two looks at what has been closed
PATIENCE = 30.0  # seconds that the beginning of a run waits for the first answer
STALLED = 300.0  # seconds without a byte sent, after which the end of a run waits no longer


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
        self._looked: dict[Path, tuple[int, int]] = {}  # when tables' folders had changed, at the last two looks
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
            allowed = refusal(self._refused) or ()
            raise ConfigError(Mistake(self.remote.where, problem, written=self.remote.address, allowed=allowed))

    @property
    def is_refused(self) -> bool:
        """Whether nothing may be written there, as it showed before the run began."""
        return self._refused is not None and self._there is None

    def messages(self) -> list[str]:
        """What has gone wrong, or right again, since this was asked last."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def end(self) -> Sent:
        """Send what is left, wait for it as long as it gets on, and tell what came of it."""
        self._over.set()
        before, since = self.remote.moved, time.monotonic()
        while self._thread.is_alive() and time.monotonic() - since < STALLED:
            self._thread.join(LOOK)
            if self.remote.moved != before:
                before, since = self.remote.moved, time.monotonic()
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
                put(self.folder, self.remote, file.relative_to(self.folder).as_posix())

    def _follow(self) -> None:
        """Send what is closed, again and again, until the run is over or something else is found there."""
        failures, lost = 0, False
        while not self._over.is_set():
            try:
                self._look()
            except Exception as error:
                failures += 1
                if isinstance(error, UploadError) or (self._there is None and refusal(error) is not None):
                    self._refused = error
                    self.sent.missing[""] = told(error)
                if self._refused or (not lost and (failures >= ATTEMPTS or not self._answered.is_set())):
                    lost = True
                    goes_on = "nothing is sent" if self._refused else "it is tried again"
                    rest = "all" if self.keep_local or not self.sent.files else "what was not sent"
                    self._messages.append(
                        f"{self.remote.address}: {told(error)}; {goes_on}, {rest} is in {self.folder}"
                    )
            else:
                if lost:
                    self._messages.append(f"{self.remote.address} is reached again")
                failures, lost = 0, False
            self._answered.set()
            if self._refused is not None:
                return
            self._over.wait(pause_after(failures) if failures else LOOK)

    def _look(self) -> None:
        """Send what has been closed since the last look."""
        if self._there is None:
            if self.rank == 0:
                self._put_record()
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
            self._put_record()  # its time there is the run's last sign of life
        if not self.keep_local:
            remove_sent(self.folder, self.remote, self.rank)

    def _put_record(self) -> None:
        """Send run.json, where there is none of another run; what came between looking and sending shows in a second look.

        Raises:
            UploadError: There is one.
        """
        refuse_other_run(self.folder, self.remote)
        self.remote.put(self.folder / RECORD, RECORD)
        refuse_other_run(self.folder, self.remote)

    def _unseen(self) -> Iterator[Path]:
        """The parts in those tables' folders that have changed since the look before the last.

        Not since the last one: a part that comes just behind it can leave the folder's time as it is, which goes on in ticks.
        """
        for table in TABLES:
            place = self.folder / table
            with suppress(FileNotFoundError):
                changed = place.stat().st_mtime_ns
                before = self._looked.get(place, (0, 0))
                if before != (changed, changed):
                    yield from (file for part, file in parts_of(self.folder, table).items() if part.rank == self.rank)
                    self._looked[place] = (before[1], changed)
