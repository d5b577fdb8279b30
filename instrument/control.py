"""`python -m instrument.control RUN CHANGE ...`: change a run in progress at its next step.

Exit codes: 0, the changes were made; 1, the run is not in progress, or refused them; 2, a change is invalid, or there is no run;
130, interrupted by Ctrl-C while waiting. The message is then withdrawn if the run has not read it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .analysis.run_files import RunFiles
from .errors import ConfigError, InstrumentError, Problem
from .folders.control_folder import Answer, ControlFolder, answer_to, send, withdraw
from .sinks.lock import is_locked
from .sinks.remote_folder import check_is_local
from .spec.run_changes import ALLOWED, Settings, parse_changes

POLL_SECONDS = 0.05


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m instrument.control", description="Change a run in progress at its next step."
    )
    parser.add_argument("run", metavar="RUN", help="the folder of the run")
    parser.add_argument("changes", metavar="CHANGE", nargs="+", help=ALLOWED)
    args = parser.parse_args(arguments)
    try:
        answer = change(args.run, args.changes)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except InstrumentError as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if answer.problem is not None:
        print(answer.problem, file=sys.stderr)
        return 1
    for made in answer.changes:
        print(f"after {answer.step} steps  {made}")
    return 0


def change(run: str, changes: Sequence[str]) -> Answer:
    """Send changes to a run and wait for its answer.

    Args:
        run: The folder of the run.
        changes: The changes, see `instrument.spec.run_changes.parse_changes`.

    Raises:
        ConfigError: A change is invalid, or the folder contains no run that takes changes.
        InstrumentError: The run is not in progress, belongs to another user, or ended before it read the message.
    """
    check_is_local(run, "RUN", "a run can only be changed in its local folder", fix="run this command on its machine")
    folder = Path(run)
    if not (folder / "run.json").exists():
        raise ConfigError(Problem("RUN", "there is no run.json in this folder", run, "the folder of a run"))
    info = RunFiles(folder).info()
    if info["status"] != "running":
        raise InstrumentError(f"{folder} is not in progress: its status is {info['status']}")
    config = info.get("config") or {}
    if "train" not in config:
        problem = "the run was started with instrument.attach; only runs of `python -m instrument` can be changed"
        raise ConfigError(Problem("RUN", problem, run))
    settings = Settings.of(config)
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
        return _wait(folder, message)
    finally:
        withdraw(message)


def _wait(folder: Path, message: Path) -> Answer:
    while (answer := answer_to(message)) is None:
        if not is_locked(folder) and answer_to(message) is None:
            raise InstrumentError(f"{folder}: the run ended before it read the message")
        time.sleep(POLL_SECONDS)
    return answer


if __name__ == "__main__":
    sys.exit(main())
