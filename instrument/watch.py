"""`python -m instrument.watch RUN [--once | --web [--port PORT]]`: follow a run or a sweep that is in progress.

Exit codes: 0, the run is done, or all jobs of the sweep; 1, it failed or was killed, or it cannot be read; 2, there is no
run, or the arguments are invalid; 130, interrupted by Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, RenderableType
from rich.live import Live

from .analysis.folders import NoRunError, find_runs
from .errors import ConfigError, InstrumentError, Problem
from .sinks.remote_folder import SWEEP_RECORD, is_address, open_folder

if TYPE_CHECKING:
    from pathlib import Path

PIPE_WIDTH = 160
OPENING_SECONDS = 0.5  # for the first frame; earlier steps of a long run are read afterwards
READING_SECONDS = 0.25  # for earlier steps, in each later frame
INTERVAL, REMOTE_INTERVAL = 1.0, 10.0  # seconds between two frames
PAUSE = 9  # A pause takes at least this many times as long as reading, so that a watcher uses a tenth of a core.
SUCCESSFUL = ("done", "running")


class View(Protocol):
    """A run or a sweep that is followed."""

    @property
    def is_running(self) -> bool:
        """Whether it is in progress."""

    @property
    def is_complete(self) -> bool:
        """Whether all rows have been read."""

    @property
    def is_successful(self) -> bool:
        """Whether nothing has failed so far."""

    def refresh(self, seconds: float = ...) -> object:
        """Read new rows, and earlier ones for some seconds."""

    def frame(self, height: int | None = ...) -> RenderableType:
        """Return the state as text."""


class RunView:
    """A run that is followed.

    Args:
        folder: The folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        from .live.live_run import LiveRun
        from .live.terminal import frame

        self.live = LiveRun(folder)
        self.refresh = self.live.refresh
        self.frame = partial(frame, self.live)

    @property
    def is_running(self) -> bool:
        """Whether the run is in progress."""
        return self.live.is_running

    @property
    def is_complete(self) -> bool:
        """Whether all rows have been read."""
        return self.live.fraction_read == 1

    @property
    def is_successful(self) -> bool:
        """Whether the run is done or in progress."""
        return self.live.info["status"] in SUCCESSFUL


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m instrument.watch", description="Follow a run or a sweep that is in progress."
    )
    parser.add_argument(
        "run", metavar="RUN", help="the folder of a run, the folder of a sweep, or the remote address of one of them"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="print the current state and exit")
    how.add_argument(
        "--web", action="store_true", help="serve the report of a run, updated while the run is in progress"
    )
    parser.add_argument("--port", type=int, default=0, help="the port of --web on this machine (default: a free one)")
    args = parser.parse_args(arguments)
    interval = REMOTE_INTERVAL if is_address(args.run) else INTERVAL
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = PIPE_WIDTH
    try:
        view = open_view(args.run)
        if args.web:
            _serve(view, args.run, args.port, interval)
        elif args.once:
            view.refresh()
            console.print(view.frame())
        else:
            _follow(view, console, interval)
        return 0 if view.is_successful else 1
    except (NoRunError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 2
    except InstrumentError as error:
        print(error, file=sys.stderr)
        return 1
    except OSError as error:
        print(f"--port {args.port}: {error.strerror}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def open_view(folder: str) -> View:
    """Return the view of a run, or of a sweep if the folder contains several runs or the record of a sweep.

    Args:
        folder: A path or an address.

    Raises:
        NoRunError: The folder does not exist or contains no run.
        ConfigError: The address is invalid, or a package is missing.
    """
    root = open_folder(folder)
    if not (root / SWEEP_RECORD).exists():
        root, folders = find_runs(folder)
        if folders == [root]:
            return RunView(root)
    from .live.sweep import LiveSweep

    return LiveSweep(folder)


def _follow(view: View, console: Console, interval: float) -> None:
    """Show a view until the run or the sweep ends."""
    height = (lambda: console.height) if console.is_terminal else (lambda: None)
    seconds = OPENING_SECONDS
    with Live(console=console, auto_refresh=False) as shown:
        while True:
            began = time.monotonic()
            view.refresh(seconds)
            is_over = not view.is_running and view.is_complete
            shown.update(view.frame(height()), refresh=True)
            if is_over:
                return
            if view.is_running:
                seconds = READING_SECONDS
                time.sleep(max(interval, PAUSE * (time.monotonic() - began)))


def _serve(view: View, folder: str, port: int, interval: float) -> None:
    """Serve the page of a run until Ctrl-C.

    Raises:
        ConfigError: The folder contains several runs.
        OSError: The port is not available.
    """
    if not isinstance(view, RunView):
        message = "the folder contains several runs, and the page shows one run"
        raise ConfigError(Problem("--web", message, folder, fix="pass the folder of a job, or omit --web"))
    from .live.server import LiveServer

    server = LiveServer(
        view.live,
        lambda seconds: max(interval, PAUSE * seconds),
        opening_seconds=OPENING_SECONDS,
        reading_seconds=READING_SECONDS,
    )
    server.serve(port, lambda address: print(f"{address}\nCtrl-C ends the server.", flush=True))


if __name__ == "__main__":
    sys.exit(main())
