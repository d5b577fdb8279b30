"""The folder of a run or sweep: its unique name, its reservation, and the uploaded record of a sweep."""

from __future__ import annotations

import sys
from contextlib import suppress
from itertools import count
from pathlib import Path

from omegaconf import DictConfig, OmegaConf, flag_override

from ..errors import ConfigError, Problem
from ..folders.folder_snapshot import Snapshot
from ..sinks.remote_errors import safe_message
from ..sinks.remote_folder import REMOTE_KEY, SWEEP_RECORD, RemoteFolder
from ..sweeps.jobs import folder_override

NOW_RESOLVER = "${now:"


def contains_time(part: DictConfig) -> bool:
    """Return whether a folder name contains the current time (`${now:...}`), so that another name also serves.

    Args:
        part: Section `hydra.run` or `hydra.sweep`, with the key `dir`.
    """
    return NOW_RESOLVER in str(OmegaConf.to_container(part, resolve=False)["dir"])  # type: ignore[call-overload,index]


def create_unique_folder(folder: Path) -> Path:
    """Create a folder that does not exist yet.

    Args:
        folder: Preferred path. If it exists, `_2`, `_3`, ... is appended to its name.

    Returns:
        The created folder; `folder` itself if it cannot be created. The first write to it then raises the error.
    """
    for number in count(1):
        own = folder if number == 1 else folder.with_name(f"{folder.name}_{number}")
        try:
            own.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:
            return folder
        return own
    raise AssertionError("unreachable: count() never ends")


def reserve_folder(folder: Path, *, contains_time: bool) -> tuple[Path, Snapshot]:
    """Reserve a folder.

    Args:
        folder: Requested folder.
        contains_time: Whether the name contains the time. If so, and the folder exists, a folder next to it is
            created.

    Returns:
        The reserved folder, and a snapshot of its state before.
    """
    before = Snapshot.take(folder)
    own = create_unique_folder(folder) if contains_time else folder
    if own != folder:
        before = Snapshot(own.absolute(), (own.absolute(),), frozenset(), {})
    return own, before


def set_sweep_folder(config: DictConfig, folder: Path) -> None:
    """Set the sweep folder in the configuration and in the overrides of all jobs, whose processes may run elsewhere."""
    with flag_override(config, "readonly", False):
        config.hydra.sweep.dir = str(folder)
        config.hydra.overrides.hydra.append(folder_override("hydra.sweep.dir", folder))


def upload_record(folder: Path, address: str | None) -> None:
    """Upload the record of a sweep to the remote folder of its jobs, so that missing jobs are known there.

    Args:
        folder: Local folder of the sweep.
        address: Remote folder of the sweep; None if nothing is uploaded.

    Raises:
        ConfigError: The remote folder already contains a sweep. Any other error is printed as a warning.
    """
    if address is None:
        return
    try:
        remote = RemoteFolder(address, REMOTE_KEY)
        if remote.read(SWEEP_RECORD) is not None:
            message = "the folder already contains a sweep, and sweeps are never overwritten"
            raise ConfigError(Problem(REMOTE_KEY, message, given=address))
        remote.put(folder / SWEEP_RECORD, SWEEP_RECORD)
    except ConfigError:
        raise
    except Exception as error:  # Each storage client raises its own types. Each job tries again.
        print(f"warning: {SWEEP_RECORD} was not uploaded to {address}: {safe_message(error)}", file=sys.stderr)


def remove_uploaded_record(address: str | None) -> None:
    """Remove the uploaded record of a sweep in which no job was started."""
    if address is not None:
        with suppress(Exception):  # The failed upload has already been reported.
            RemoteFolder(address, REMOTE_KEY).remove(SWEEP_RECORD)
