"""The copy of a run in the remote folder `sink.remote`, which is uploaded during and after the run."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol

from ..capture.reducer import own_rank
from ..errors import ConfigError, Mistake
from ..sinks.client_errors import told
from ..sinks.remote import REMOTE, RemoteFolder, check_remote, folder_at, place_of
from ..sinks.transfer import Sent, is_of, send_all, take_back
from ..sinks.upload import Upload
from ..spec.config import SinkConfig
from .run_folder import ASIDE


class Voice(Protocol):
    """The output for messages about uploads: a terminal, or Python warnings."""

    def warn(self, message: str) -> None:
        """Show a warning."""

    def sent(self, address: str, size: int) -> None:
        """Show that the upload is complete.

        Args:
            address: The address of the remote folder.
            size: The number of uploaded bytes.
        """


class RemoteCopy:
    """Uploads a run to a remote folder, in the background and at the end. Does nothing without a remote address.

    Use it as a context manager: the remaining files are uploaded at the end of the block.

    Args:
        folder: The folder of the run.
        sink: The `sink` section: the remote address and whether local files are kept.
        voice: The output for messages.
        where: The configuration key of the address, for error messages. Default: `sink.remote`.

    Attributes:
        address: The address of the remote folder of this run; None without a remote address.

    Raises:
        ConfigError: The address is invalid, or a required package is missing.
    """

    def __init__(self, folder: Path, sink: SinkConfig, voice: Voice, *, where: str = REMOTE) -> None:
        self.folder = folder
        self.keep_local = sink.keep_local
        self.voice = voice
        check_remote(sink.remote, where)
        self.address = None if sink.remote is None else place_of(folder, sink.remote)
        self._remote = None if self.address is None else RemoteFolder(self.address, where)
        self._upload: Upload | None = None
        self._ended = False

    def take_back(self, parts: Mapping[str, int]) -> None:
        """Remove remote parts that contain rows of repeated steps, after a resume.

        Args:
            parts: By table, the number of parts that remain.

        Raises:
            ConfigError: The parts cannot be removed.
        """
        if self._remote is None:
            return
        try:
            take_back(self._remote, own_rank(), parts)
        except Exception as error:  # Each storage client raises its own exceptions.
            problem = f"rows of steps that are done again cannot be taken back there: {told(error)}"
            raise ConfigError(Mistake(self._remote.where, problem, written=self.address)) from None

    def begin(self) -> None:
        """Start the upload in the background. Call it before the first step.

        Raises:
            ConfigError: The remote folder is not writable, or contains another run.
        """
        if self._remote is not None:
            if own_rank() == 0:
                self._put_aside(self._remote)
            self._upload = Upload(self.folder, self._remote, rank=own_rank(), keep_local=self.keep_local)
            self._upload.begin()

    def _put_aside(self, remote: RemoteFolder) -> None:
        """Move the remote files of previous attempts of a sweep's job to the folder of previous attempts."""
        for aside in sorted((self.folder.parent / ASIDE).glob(f"{self.folder.name}.*")):
            with suppress(Exception):  # An unreachable server is reported when the upload begins.
                if is_of(aside, remote):
                    remote.move(f"{ASIDE}/{aside.name}")

    def messages(self) -> list[str]:
        """Return the messages about failed and recovered uploads since the last call."""
        return [] if self._upload is None else self._upload.messages()

    def __enter__(self) -> RemoteCopy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Upload the remaining files, also after an exception."""
        if self._upload is None or self._upload.is_refused:
            return
        try:
            sent = self._end()
        except KeyboardInterrupt:
            self._tell(Sent(missing={"": "interrupted"}))
            raise
        self._tell(sent)

    def readable(self) -> Path:
        """Return the folder from which the rows of a finished run can be read.

        This is the local folder, unless local files are removed after the upload and the upload is complete.
        """
        if self.address is None or self.keep_local or own_rank():
            return self.folder
        return self.folder if self._end().missing else folder_at(self.address)

    def _end(self) -> Sent:
        """Upload the remaining files. A second call uploads the files that were added since the first call."""
        assert self._upload is not None
        assert self._remote is not None
        if self._ended:
            if self._upload.sent.missing:
                return self._upload.sent
            with suppress(Exception):  # Missing files were reported after the first call.
                send_all(self.folder, self._remote, self._upload.sent)
            return self._upload.sent
        self._ended = True
        return self._upload.end()

    def _tell(self, sent: Sent) -> None:
        """Report the result of the upload."""
        if sent.missing:
            name, problem = next(iter(sent.missing.items()))
            first = f"{name}: {problem}" if name else problem
            more = f", and {len(sent.missing) - 1} more" if len(sent.missing) > 1 else ""
            command = f"python -m instrument.upload {shlex.quote(str(self.folder))}"
            self.voice.warn(f"not all is in {self.address} ({first}{more}); what is missing is sent by: {command}")
        elif own_rank() == 0:
            self.voice.sent(str(self.address), sent.bytes)
