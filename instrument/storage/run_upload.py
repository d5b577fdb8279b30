"""The copy of a run in the remote folder `sink.remote`, which is uploaded during and after the run."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from ..config.experiment import SinkConfig
from ..errors import ConfigError, Problem
from ..formatting import shown_path
from ..values.dtensor import own_rank
from .background_upload import Upload
from .remote_folder import REMOTE_KEY, RemoteFolder, check_remote, folder_at, remote_address_of, safe_message
from .remote_transfer import TransferResult, is_same_run, remove_parts_after, send_all
from .run_record import PREVIOUS_ATTEMPTS


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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
