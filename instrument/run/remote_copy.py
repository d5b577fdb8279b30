"""A run's second place: what `sink.remote` says, while the run goes on and when it is over."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Protocol

from ..capture.ranks import own_rank
from ..errors import ConfigError, Mistake
from ..sinks.client_errors import told
from ..sinks.remote import REMOTE, RemoteFolder, check_remote, folder_at, place_of
from ..sinks.sending import Sent, is_of, send_all, take_back
from ..sinks.upload import Upload
from ..spec.config import SinkConfig
from .folder import ASIDE


class Voice(Protocol):
    """Who tells the user: a terminal, or warnings."""

    def warn(self, message: str) -> None:
        """Something went wrong."""

    def sent(self, address: str, size: int) -> None:
        """All is there, and so many bytes were sent."""


class RemoteCopy:
    """Sends a run to a remote folder, beside it and behind it; does nothing where none is asked for.

    Args:
        folder: The run's folder.
        sink: What is asked for: the address that runs lie below, and whether parts stay here too.
        voice: Who tells what was sent, and what was not.
        where: What the user says the address by.

    Attributes:
        address: Of the run's own folder there.

    Raises:
        ConfigError: The address is none, or a package is missing.
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
        """Of a run that goes on, take away what was sent of the steps that are done again.

        Args:
            parts: How many parts of each table stay.

        Raises:
            ConfigError: They cannot be taken away.
        """
        if self._remote is None:
            return
        try:
            take_back(self._remote, own_rank(), parts)
        except Exception as error:  # of many kinds: whatever a client raises
            problem = f"rows of steps that are done again cannot be taken back there: {told(error)}"
            raise ConfigError(Mistake(self._remote.where, problem, written=self.address)) from None

    def begin(self) -> None:
        """The run is about to make its first step.

        Raises:
            ConfigError: The place cannot be written, or holds another run.
        """
        if self._remote is not None:
            if own_rank() == 0:
                self._put_aside(self._remote)
            self._upload = Upload(self.folder, self._remote, rank=own_rank(), keep_local=self.keep_local)
            self._upload.begin()

    def _put_aside(self, remote: RemoteFolder) -> None:
        """Of a sweep's job that is done again, put aside there too what it left."""
        for aside in sorted((self.folder.parent / ASIDE).glob(f"{self.folder.name}.*")):
            with suppress(Exception):  # of many kinds: who cannot be reached is met again when the upload begins
                if is_of(aside, remote):
                    remote.move(f"{ASIDE}/{aside.name}")

    def messages(self) -> list[str]:
        """What has gone wrong, or right again, since this was asked last."""
        return [] if self._upload is None else self._upload.messages()

    def __enter__(self) -> RemoteCopy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """The run is over, however it ended: send what is left."""
        if self._upload is None or self._upload.is_refused:
            return
        try:
            sent = self._end()
        except KeyboardInterrupt:
            self._tell(Sent(missing={"": "interrupted"}))
            raise
        self._tell(sent)

    def readable(self) -> Path:
        """Where the rows of a run that is over are: here, or, where what is sent is removed here, there once all is sent."""
        if self.address is None or self.keep_local or own_rank():
            return self.folder
        return self.folder if self._end().missing else folder_at(self.address)

    def _end(self) -> Sent:
        """Send what is left; a second time, what has been added since the first."""
        assert self._upload is not None
        assert self._remote is not None
        if self._ended:
            if self._upload.sent.missing:
                return self._upload.sent
            with suppress(Exception):  # of many kinds: what is missing was told
                send_all(self.folder, self._remote, self._upload.sent)
            return self._upload.sent
        self._ended = True
        return self._upload.end()

    def _tell(self, sent: Sent) -> None:
        if sent.missing:
            name, problem = next(iter(sent.missing.items()))
            first = f"{name}: {problem}" if name else problem
            more = f", and {len(sent.missing) - 1} more" if len(sent.missing) > 1 else ""
            command = f"python -m instrument.upload {shlex.quote(str(self.folder))}"
            self.voice.warn(f"not all is in {self.address} ({first}{more}); what is missing is sent by: {command}")
        elif own_rank() == 0:
            self.voice.sent(str(self.address), sent.bytes)
