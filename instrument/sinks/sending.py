"""A run's files, sent to a remote folder: which they are, which of them are there, and what is removed when.

A part never changes, so that one that is there is not sent again; what is in a journal is in no part yet, and stays where it
is. Files are sent from disk, one after the other.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..capture.tables import TABLES
from .client_errors import told
from .lock import LOCK
from .parts import JOURNALS, parts_of, written_parts
from .remote import RemoteFolder, UploadError, folder_at

RECORD = "run.json"
ATTEMPTS = 3  # at one file, before the user is told, and at the end before it is left out
PAUSES = (1.0, 2.0, 5.0, 15.0, 60.0)  # seconds before the next attempt, the last one from then on
SMALL = 2**20  # bytes of a file that is compared by what it holds
CHECKPOINTS = "checkpoints/"  # besides parts, what is never written a second time under its name


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
                put(folder, remote, name)
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
        _remove_old_checkpoints(folder, remote)
    return sent


def _remove_old_checkpoints(folder: Path, remote: RemoteFolder) -> None:
    """Remove the checkpoints there in whose place newer ones have come, here and there."""
    here = {name for name in files_of(folder) if name.startswith(CHECKPOINTS)}
    for name in remote.sizes() if here else ():
        if name.startswith(CHECKPOINTS) and name not in here:
            remote.remove(name)


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
    return name.startswith(CHECKPOINTS) or (size <= SMALL and file.read_bytes() == remote.read(name))


def put(folder: Path, remote: RemoteFolder, name: str) -> None:
    """Send a file, with some patience.

    Raises:
        Exception: Of many kinds: it cannot be reached.
    """
    for attempt in range(ATTEMPTS):
        try:
            return remote.put(folder / name, name)
        except Exception:
            if attempt == ATTEMPTS - 1:
                raise
            time.sleep(pause_after(attempt + 1))
    return None


def pause_after(failures: int) -> float:
    """Seconds before the next attempt, after so many that failed."""
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
