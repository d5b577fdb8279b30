"""The announcement of the folder of a run: rank 0 sends it to the other processes, through the store of the process group.

The processes are on several machines, whose folders of the run may be the same one (a shared file system) or not.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from .lock import is_locked

VISIBLE_TIMEOUT = 5.0  # seconds after which a network file system shows a new file on all machines
_runs = count()  # The n-th run of a process has the same number in all processes.


class RunAnnouncement:
    """The announcement of one run. Each process creates one, at the same point of the program."""

    def __init__(self) -> None:
        from torch.distributed import distributed_c10d  # only runs with several processes import PyTorch here

        self._run = f"instrument/{next(_runs)}"
        self._store = distributed_c10d._get_default_store()

    def send(self, record: Mapping[str, Any]) -> None:
        """Announce on rank 0 that the run has begun, with the content of its run.json."""
        self._store.set(f"{self._run}/begun", json.dumps([socket.gethostname(), record], default=str))

    def receive(self, timeout: float) -> tuple[str, dict[str, Any]] | None:
        """Return the host of rank 0 and the content of its run.json; None after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self._store.check([f"{self._run}/begun"]):
            if time.monotonic() > deadline:
                return None
            time.sleep(0.05)  # unlike `wait` of the store, this ends at Ctrl-C
        host, record = json.loads(self._store.get(f"{self._run}/begun"))
        return host, record

    def check_shared(self, folder: Path, host: str, record: Mapping[str, Any]) -> bool:
        """Return whether rank 0 on `host`, which announced `record`, uses this folder, and tell rank 0 if it does not."""
        deadline = time.monotonic() + (0.0 if host == socket.gethostname() else VISIBLE_TIMEOUT)
        while not (is_shared := is_locked(folder) or _has_ended(folder, record)) and time.monotonic() < deadline:
            time.sleep(0.05)
        if not is_shared:
            self._store.set(f"{self._run}/separate", "")
        return is_shared

    @property
    def has_separate_folders(self) -> bool:
        """Whether a process does not share the folder of rank 0. False if the store is gone."""
        with suppress(RuntimeError):
            return bool(self._store.check([f"{self._run}/separate"]))
        return False


def _has_ended(folder: Path, record: Mapping[str, Any]) -> bool:
    """Return whether a folder has the run of this record; rank 0 unlocks it at the end, maybe before another process begins."""
    with suppress(OSError, ValueError):
        found = json.loads((folder / "run.json").read_text())
        return "rank" not in found and all(found.get(key) == record.get(key) for key in ("started", "resumed"))
    return False
