"""The copy of a run in the remote folder `sink.remote`. A thread uploads parts during the run, and the rest at its end.

    run.json                            first, with the status `running`, and repeatedly after new parts
    stats/part-0000-000000.parquet      when it is complete
    .hydra/, instrument.log, ...        at the end, run.json last

No step waits for the upload, and no rows are kept in memory for it.
"""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

from ..config.experiment import SinkConfig
from ..errors import ConfigError, Problem
from ..formatting import shown_path
from ..runtime.forks import OwnedByProcess
from ..values.dtensor import own_rank
from .remote_folder import (
    REMOTE_KEY,
    RemoteFolder,
    UploadError,
    check_remote,
    folder_at,
    permanent_error_hint,
    remote_address_of,
    safe_message,
)
from .remote_transfer import (
    ATTEMPTS,
    RECORD,
    TransferResult,
    check_same_run,
    is_same_run,
    local_parts,
    pause_after,
    remove_parts_after,
    remove_sent,
    send_all,
    send_with_retries,
)
from .run_record import PREVIOUS_ATTEMPTS

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
        for file in local_parts(self.folder, self.rank):
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


class RemoteCopy:
    """Uploads a run to a remote folder, in the background and at the end. Does nothing without a remote address.

    Use it as a context manager: the remaining files are uploaded at the end of the block.

    Args:
        sink: The `sink` section: the remote address and whether local files are kept.
        warn: Called with the text of each warning.
        uploaded: Called with the remote address and the number of bytes when the upload is complete. Default: nothing is called.

    Attributes:
        address: The address of the remote folder of this run; None without a remote address.

    Raises:
        ConfigError: The address is invalid, or a required package is missing.
    """

    def __init__(
        self,
        folder: Path,
        sink: SinkConfig,
        warn: Callable[[str], None],
        uploaded: Callable[[str, int], object] = lambda *_: None,
        *,
        where: str = REMOTE_KEY,
    ) -> None:
        self.folder = folder
        self.keep_local = sink.keep_local
        self.warn, self.uploaded = warn, uploaded
        check_remote(sink.remote, where)
        self.address = None if sink.remote is None else remote_address_of(folder, sink.remote)
        self._remote = None if self.address is None else RemoteFolder(self.address, where)
        self._upload: Upload | None = None
        self._finished = False

    def remove_parts_after(self, parts: Mapping[str, int]) -> None:
        """Remove remote parts with rows of repeated steps, after a resume; `parts` of each table remain. Raise a ConfigError on failure."""
        if self._remote is None:
            return
        try:
            remove_parts_after(self._remote, own_rank(), parts)
        except Exception as error:  # Each storage client raises its own exceptions.
            message = f"cannot remove the rows of repeated steps from the remote folder: {safe_message(error)}"
            raise ConfigError(Problem(self._remote.where, message, given=self.address)) from None

    def begin(self) -> None:
        """Start the upload, before the first step. Raise a ConfigError if the remote folder is not writable, or contains another run."""
        if self._remote is not None:
            attempts = (self.folder.parent / PREVIOUS_ATTEMPTS).glob(f"{self.folder.name}.*")
            for attempt in sorted(attempts) if own_rank() == 0 else ():  # of a job of a sweep
                with suppress(Exception):  # An unreachable server is reported when the upload begins.
                    if is_same_run(attempt, self._remote):
                        self._remote.move(f"{PREVIOUS_ATTEMPTS}/{attempt.name}")
            self._upload = Upload(self.folder, self._remote, rank=own_rank(), keep_local=self.keep_local)
            self._upload.begin()

    def messages(self) -> list[str]:
        """Return the messages about failed and recovered uploads since the last call."""
        return [] if self._upload is None else self._upload.messages()

    def __enter__(self) -> RemoteCopy:
        return self

    def __exit__(self, *error: object) -> None:
        """Upload the remaining files, also after an exception."""
        if self._upload is None or self._upload.is_refused or self._upload.is_inherited:
            return
        try:
            result = self._finish()
        except KeyboardInterrupt:
            self._report_result(TransferResult(failed={"": "interrupted"}))
            raise
        self._report_result(result)

    def finish_ranks(self, exchange: Callable[[str | None], list[str | None]]) -> None:
        """Upload the remaining parts of all processes except rank 0, which uploads the final run.json afterwards.

        `exchange` returns the arguments of all processes, which call it together.
        """
        failed = self._finish().failed if self._upload is not None and own_rank() else {}
        for rank, problem in enumerate(exchange(next(iter(failed.values()), None))):
            if problem is not None:
                self.warn(
                    f"the upload of rank {rank} is incomplete ({problem}); its files are in its folder {self.folder}"
                )

    def readable_folder(self, *, is_shared: bool) -> Path:
        """Return the folder with all rows of a finished run: the remote one, if the upload is complete and local rows are missing."""
        if self.address is None or (self.keep_local and is_shared) or own_rank():
            return self.folder
        return self.folder if self._finish().failed else folder_at(self.address)

    def _finish(self) -> TransferResult:
        """Upload the remaining files. A second call uploads the files that were added since the first call."""
        assert self._upload is not None
        assert self._remote is not None
        if not self._finished:
            self._finished = True
            return self._upload.end()
        if not self._upload.sent.failed and not own_rank():
            with suppress(Exception):  # Missing files were reported after the first call.
                send_all(self.folder, self._remote, self._upload.sent)
        return self._upload.sent

    def _report_result(self, result: TransferResult) -> None:
        if result.failed:
            name, problem = next(iter(result.failed.items()))
            first = f"{name}: {problem}" if name else problem
            more = f", and {len(result.failed) - 1} more" if len(result.failed) > 1 else ""
            command = f"python -m instrument.upload {shlex.quote(str(shown_path(self.folder)))}"
            self.warn(
                f"the upload to {self.address} is incomplete ({first}{more}); upload the missing files with: {command}"
            )
        elif own_rank() == 0:
            self.uploaded(str(self.address), result.bytes)
