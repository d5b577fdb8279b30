"""Transfer of a run's files to a remote folder: which files are sent, which exist already, and which are removed.

A part never changes, so an existing one is not sent again. Journals stay local; their rows are sent when they are in a
part. Files are sent from disk, one by one. If the service cannot be reached, clients raise exceptions of many types.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..tables.schemas import TABLES
from .lock import LOCK
from .parts import JOURNALS, block_files, files_after, part_files, written_parts
from .remote_folder import RemoteFolder, UploadError, folder_at, safe_message

RECORD = "run.json"
ATTEMPTS = 3  # attempts per file; then a warning is logged, and at the end the file is skipped
PAUSES = (1.0, 2.0, 5.0, 15.0, 60.0)  # seconds before the next attempt; the last value repeats
SMALL = 2**20  # bytes up to which files are compared by content
CHECKPOINTS = "checkpoints/"  # these files never change, like parts


@dataclass
class TransferResult:
    """The numbers of files and bytes sent, and the files that could not be sent, each with the reason."""

    files: int = 0
    bytes: int = 0
    failed: dict[str, str] = field(default_factory=dict)


def files_of(folder: Path) -> Iterator[str]:
    """Yield the files of a run that are sent, run.json last. Excluded are journals, locks, temporary files, and a copy of run.json."""
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        is_excluded = name == RECORD or name.startswith((LOCK, f"{JOURNALS}/")) or name.endswith(".tmp")
        if file.is_file() and not is_excluded:
            yield name
    if "rank" not in json.loads((folder / RECORD).read_text()):  # the copy in a folder without rank 0 has it
        yield RECORD


def local_parts(folder: Path, rank: int | None = None) -> Iterator[Path]:
    """Yield the parts of all tables and the ended block files, of all processes or of one.

    Block files come first: a reader that finds a part remotely also finds the bytes of its rows. They are listed last, since a run can
    end a block and write a part while they are sent.
    """
    parts = [each for table in TABLES for each in part_files(folder, table).items()]
    yield from (file for part, file in (*block_files(folder, ended=True).items(), *parts) if rank in (None, part.rank))


def is_same_run(folder: Path, remote: RemoteFolder) -> bool | None:
    """Return whether a remote folder contains the same run as a local folder; None if it contains none."""
    remote_record = remote.read(RECORD)
    if remote_record is None:
        return None
    with suppress(OSError, ValueError, AttributeError):
        local, other = json.loads((folder / RECORD).read_text()), json.loads(remote_record)
        return all(local.get(key) == other.get(key) for key in ("started", "config_hash", "seed"))
    return False


def check_same_run(folder: Path, remote: RemoteFolder) -> None:
    """Raise an UploadError if a remote folder contains another run."""
    if is_same_run(folder, remote) is False:
        raise UploadError(f"{remote.address} already contains another run, and runs are never overwritten")


def send_all(folder: Path, remote: RemoteFolder, sent: TransferResult | None = None) -> TransferResult:
    """Send all files that the remote folder lacks. Add to an earlier result. Raise an UploadError for a folder of another run."""
    sent = TransferResult() if sent is None else sent
    check_same_run(folder, remote)
    remote_sizes = remote.sizes()
    parts = {file.relative_to(folder).as_posix() for file in local_parts(folder)}
    sent.failed.clear()
    failure_count = 0
    for name in files_of(folder):
        try:
            size = (folder / name).stat().st_size
            if name in parts and remote_sizes.get(name, size) != size:
                sent.failed[name] = f"the remote file has {remote_sizes[name]:,} bytes, the local one {size:,}"
            if name in remote_sizes and (
                name in parts or _is_same(folder / name, size, remote, name, remote_sizes[name])
            ):
                continue
            if failure_count < ATTEMPTS:
                send_with_retries(folder, remote, name)
            else:
                raise ConnectionError("not tried, because other files failed")
        except Exception as error:
            failure_count += 1
            sent.failed[name] = safe_message(error)
        else:
            sent.files, sent.bytes = sent.files + 1, sent.bytes + size
    if not sent.failed:  # remove parts whose rows are in a merged part, and checkpoints that newer ones replaced
        names, remote_parts = remote.sizes(), folder_at(remote.address)
        for table in TABLES:
            for part in written_parts(remote_parts, table).keys() - part_files(remote_parts, table).keys():
                remote.remove(f"{table}/{part.file(remote_parts, table).name}")
        checkpoints = {name for name in files_of(folder) if name.startswith(CHECKPOINTS)}
        for name in names if checkpoints else ():
            if name.startswith(CHECKPOINTS) and name not in checkpoints:
                remote.remove(name)
    return sent


def remove_sent(folder: Path, remote: RemoteFolder, rank: int | None = None) -> None:
    """Remove the local parts that exist completely in the remote folder, of one process or of all."""
    remote_sizes = remote.sizes()
    for file in local_parts(folder, rank):
        if remote_sizes.get(file.relative_to(folder).as_posix()) == file.stat().st_size:
            file.unlink()


def _is_same(file: Path, size: int, remote: RemoteFolder, name: str, remote_size: int) -> bool:
    """Return whether a file need not be sent again. False for large files that may have changed."""
    if size != remote_size:
        return False
    return name.startswith(CHECKPOINTS) or (size <= SMALL and file.read_bytes() == remote.read(name))


def send_with_retries(folder: Path, remote: RemoteFolder, name: str) -> None:
    """Send a file, with retries."""
    for failures in range(1, ATTEMPTS):
        with suppress(Exception):
            return remote.put(folder / name, name)
        time.sleep(pause_after(failures))
    return remote.put(folder / name, name)


def pause_after(failures: int) -> float:
    """Return the seconds to wait after a number of consecutive failures."""
    return PAUSES[min(failures, len(PAUSES)) - 1]


def remove_parts_after(remote: RemoteFolder, rank: int, counts: Mapping[str, int]) -> None:
    """Remove the remote parts of one process after a number of parts per table; see `remove_rows_after_checkpoint`."""
    for file in files_after(folder_at(remote.address), rank, counts, UploadError):
        remote.remove(f"{file.parent.name}/{file.name}")
