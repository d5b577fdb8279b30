"""Upload of a run's folder by a thread: parts during the run, the rest at the end.

    run.json                            first, with the status `running`, and repeatedly after new parts
    stats/part-0000-000000.parquet      when it is complete
    .hydra/, instrument.log, ...        at the end, run.json last

No step waits for the upload, and no rows are kept in memory for it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from ..errors import ConfigError, Problem
from ..formatting import shown_path
from ..runtime.forks import OwnedByProcess
from ..tables.schemas import TABLES
from .parts import block_files, part_files
from .remote_folder import RemoteFolder, UploadError, permanent_error_hint, safe_message
from .remote_transfer import (
    ATTEMPTS,
    RECORD,
    TransferResult,
    check_same_run,
    local_parts,
    pause_after,
    remove_sent,
    send_all,
    send_with_retries,
)

CHECK_SECONDS = 1.0  # seconds between two checks for completed parts
RESPONSE_SECONDS = 30.0  # seconds that the start of a run waits for the first response
STALL_SECONDS = 300.0  # seconds without progress after which the end of a run stops waiting


class Upload(OwnedByProcess):
    """Sends completed parts during a run, and all other files at the end.

    Args:
        rank: The process whose parts are sent. Rank 0 also sends run.json, and all other files at the end.
        keep_local: Whether parts are kept locally after they are sent. Default: True.
    """

    def __init__(self, folder: Path, remote: RemoteFolder, *, rank: int, keep_local: bool = True) -> None:
        self.folder = folder
        self.remote = remote
        self.rank = rank
        self.keep_local = keep_local
        self.sent = TransferResult()
        self._remote_files: set[Path] | None = None  # parts that need not be sent; None before the first response
        # Modification times of the tables' folders at the last two checks.
        self._modified_times: dict[Path, tuple[int, int]] = {}
        self._messages: deque[str] = deque()
        self._refused: Exception | None = None
        self._answered, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._work, name="upload", daemon=True)
        super().__init__()

    def begin(self) -> None:
        """Send run.json and wait for the response. Without one, the upload is retried. Raise a ConfigError if writing is not allowed."""
        self._thread.start()
        if not self._answered.wait(RESPONSE_SECONDS):
            self._messages.append(
                f"{self.remote.address} has not responded for {RESPONSE_SECONDS:.0f} s; the upload is retried"
            )
        if self._refused is not None:
            message = f"cannot write to the remote folder: {safe_message(self._refused)}"
            fix = permanent_error_hint(self._refused) or ""
            raise ConfigError(Problem(self.remote.where, message, given=self.remote.address, fix=fix))

    @property
    def is_refused(self) -> bool:
        """Whether writing was refused before the run started."""
        return self._refused is not None and self._remote_files is None

    def messages(self) -> list[str]:
        """Return the messages about failures and recoveries since the last call."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def end(self) -> TransferResult:
        """Send the remaining files, and wait while there is progress."""
        self._ended.set()
        before, since = self.remote.moved, time.monotonic()
        while self._thread.is_alive() and time.monotonic() - since < STALL_SECONDS:
            self._thread.join(CHECK_SECONDS)
            if self.remote.moved != before:
                before, since = self.remote.moved, time.monotonic()
        if self._thread.is_alive():
            self.sent.failed[""] = f"nothing was sent for {STALL_SECONDS:.0f} s"
        return self.sent

    def _work(self) -> None:
        self._send_during_run()
        if self._refused is not None:
            return
        try:
            if self.rank == 0:
                send_all(self.folder, self.remote, self.sent)
            else:  # rank 0 may already have sent everything else
                for file in local_parts(self.folder, self.rank):
                    if self._remote_files is None or file not in self._remote_files:
                        send_with_retries(self.folder, self.remote, file.relative_to(self.folder).as_posix())
            if not self.keep_local:
                remove_sent(self.folder, self.remote, self.rank or None)
        except Exception as error:
            self.sent.failed[""] = safe_message(error)

    def _send_during_run(self) -> None:
        """Send completed parts repeatedly, until the run ends or the remote folder turns out to contain another run."""
        failures, is_disconnected = 0, False
        while not self._ended.is_set():
            try:
                self._send_new_parts()
            except Exception as error:
                failures += 1
                if isinstance(error, UploadError) or (
                    self._remote_files is None and permanent_error_hint(error) is not None
                ):
                    self._refused = error
                    self.sent.failed[""] = safe_message(error)
                if self._refused or (not is_disconnected and (failures >= ATTEMPTS or not self._answered.is_set())):
                    is_disconnected = True
                    consequence = "the upload stops" if self._refused else "the upload is retried"
                    kept = "all files are" if self.keep_local or not self.sent.files else "files that were not sent are"
                    self._messages.append(
                        f"{self.remote.address}: {safe_message(error)}; {consequence}, {kept} in {shown_path(self.folder)}"
                    )
            else:
                if is_disconnected:
                    self._messages.append(f"{self.remote.address} is reachable again")
                failures, is_disconnected = 0, False
            self._answered.set()
            if self._refused is not None:
                return
            self._ended.wait(pause_after(failures) if failures else CHECK_SECONDS)

    def _send_new_parts(self) -> None:
        if self._remote_files is None:
            if self.rank == 0:
                self._put_record()
            self._remote_files = {self.folder / name for name in self.remote.sizes()}
        before = self.sent.files
        for file in self._changed_parts():
            if file not in self._remote_files and not self._ended.is_set():
                self.remote.put(file, file.relative_to(self.folder).as_posix())
                self._remote_files.add(file)
                self.sent.files, self.sent.bytes = self.sent.files + 1, self.sent.bytes + file.stat().st_size
        if self.sent.files == before:
            return
        if self.rank == 0:
            self._put_record()  # its modification time shows that the run is active
        if not self.keep_local:
            remove_sent(self.folder, self.remote, self.rank)

    def _put_record(self) -> None:
        """Send a copy of run.json if its status is `running`; the final one is sent last. Raise an UploadError for another run."""
        content = (self.folder / RECORD).read_bytes()
        if json.loads(content)["status"] != "running":
            return
        check_same_run(self.folder, self.remote)
        with NamedTemporaryFile() as copy:
            copy.write(content)
            copy.flush()
            self.remote.put(Path(copy.name), RECORD)
        check_same_run(self.folder, self.remote)  # another run may have been sent in between

    def _changed_parts(self) -> Iterator[Path]:
        """Yield the parts of tables whose folders changed since the check before the last one.

        Modification times have a limited resolution: a part that follows a check immediately may not change the time.
        """
        for table in TABLES:
            table_folder = self.folder / table
            with suppress(FileNotFoundError):
                changed = table_folder.stat().st_mtime_ns
                before = self._modified_times.get(table_folder, (0, 0))
                if before != (changed, changed):
                    # Block files come first: a reader that finds a part remotely also finds the bytes of its rows.
                    blocks = block_files(self.folder, ended=True) if table == "tensors" else {}
                    files = (*blocks.items(), *part_files(self.folder, table).items())
                    yield from (file for part, file in files if part.rank == self.rank)
                    self._modified_times[table_folder] = (before[1], changed)
