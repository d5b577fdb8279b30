"""Requests to a run in progress: validates changes, sends them, and waits for the answer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ..analysis.run_files import RunFiles
from ..errors import ConfigError, InstrumentError, Problem
from ..sinks.lock import is_locked
from ..sinks.remote_folder import check_is_local
from ..spec.run_changes import Settings, parse_changes
from .control_folder import Answer, ControlFolder, answer_to, send, withdraw

POLL_SECONDS = 0.05
LONG_SECONDS = 2.0


def request_changes(
    run: str,
    changes: Sequence[str],
    on_long_wait: Callable[[], None] = lambda: None,
    *,
    seconds: float = float("inf"),
) -> Answer:
    """Send changes to a run and wait for its answer.

    Args:
        run: The folder of the run.
        changes: The changes, see `instrument.spec.run_changes.parse_changes`.
        on_long_wait: Called once if the current step takes more than two seconds. Default: nothing is called.
        seconds: The time after which the changes are withdrawn. Default: no limit.

    Raises:
        ConfigError: A change is invalid, or the folder contains no run that takes changes.
        InstrumentError: The run is not in progress, belongs to another user, or ended before it read the message, or the time
            is over.
    """
    check_is_local(run, "RUN", "a run can only be changed in its local folder", fix="run this command on its machine")
    folder = Path(run)
    if not (folder / "run.json").exists():
        raise ConfigError(Problem("RUN", "there is no run.json in this folder", run, "the folder of a run"))
    info = RunFiles(folder).info()
    if info["status"] != "running":
        raise InstrumentError(f"{folder} is not in progress: its status is {info['status']}")
    settings = Settings.of(info.get("config") or {})
    if settings.has_custom_loop and info.get("ranks", 1) > 1:
        problem = "a custom training loop with several processes cannot be changed"
        raise ConfigError(Problem("RUN", problem, run, "a run of python -m instrument, or a loop in one process"))
    for _, made in ControlFolder(folder).recorded():
        settings = parse_changes(made, settings).settings
    parse_changes(changes, settings)
    try:
        if (folder / "run.json").stat().st_uid != os.geteuid():
            raise InstrumentError(f"{folder} belongs to another user, and only its owner can change the run")
        message = send(folder, changes)
    except OSError as error:
        raise InstrumentError(f"{folder} cannot be written: {error.strerror}") from None
    try:
        return _wait(folder, message, on_long_wait, seconds)
    finally:
        withdraw(message)


def _wait(folder: Path, message: Path, on_long_wait: Callable[[], None], seconds: float) -> Answer:
    began, has_called = time.monotonic(), False
    while (answer := answer_to(message)) is None:
        if not is_locked(folder) and answer_to(message) is None:
            raise InstrumentError(f"{folder}: the run ended before it read the message")
        if not has_called and time.monotonic() - began > LONG_SECONDS:
            has_called = True
            on_long_wait()
        if time.monotonic() - began > seconds:
            raise InstrumentError(f"the step did not end within {seconds:g} seconds: nothing was changed")
        time.sleep(POLL_SECONDS)
    return answer
