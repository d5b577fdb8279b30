"""`python -m instrument.watch RUN [--once | --web [--port PORT] [--control]]`: follow a run or a sweep that is in progress.

Exit codes: 0, the run is done, or all jobs of the sweep; 1, it ended in another way, or it cannot be read; 2, there is no
run, or the arguments are invalid; 130, interrupted by Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.live import Live

from instrument.commands.verbs import add_json, parser_of, print_json, wide_console, with_arguments
from instrument.fields.pip_extras import packages_of
from instrument.storage.remote_folder import SWEEP_RECORD, check_is_local, is_address, open_folder
from instrument.storage.run_search import find_runs

if TYPE_CHECKING:
    from pathlib import Path

    from instrument.report.live_run import LiveRun
    from instrument.report.live_sweep import LiveSweep

OPENING_SECONDS = 0.5  # for the first frame; earlier steps of a long run are read afterwards
READING_SECONDS = 0.1  # for earlier steps, in each later frame
INTERVAL, REMOTE_INTERVAL = 1.0, 10.0  # seconds between two frames
PAUSE = 19  # A pause takes this many times the processor time of reading, so that a watcher uses a twentieth of a core.
NICENESS = 10  # priority of the process; a training that uses all cores comes first
MAX_PORT = 65_535


def command_line() -> argparse.ArgumentParser:
    parser = parser_of("watch")
    text = "the folder of a run, the folder of a sweep, or the remote address of one of them"
    parser.add_argument("run", metavar="RUN", help=text)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="print the current state and exit")
    text = "serve the report, updated while the run or the sweep is in progress"
    how.add_argument("--web", action="store_true", help=text)
    text = "the port of --web on this machine (default: a free one)"
    parser.add_argument("--port", type=port_number, default=0, help=text)
    parser.add_argument("--control", action="store_true", help="allow the page of --web to change the run")
    add_json(parser)
    return parser


@with_arguments(command_line)
def main(args: argparse.Namespace) -> int:
    if (options := [name for name in ("--port", "--control") if getattr(args, name[2:])]) and not args.web:
        command_line().error(f"{options[0]} requires --web")
    if args.json and not args.once:
        command_line().error("--json requires --once")
    interval = REMOTE_INTERVAL if is_address(args.run) else INTERVAL
    console = wide_console()
    try:
        if args.web:
            try:
                return _serve(args.run, args.port, interval, takes_changes=args.control)
            except OSError as error:
                print(f"--port {args.port}: {error.strerror}", file=sys.stderr)
                return 1
        live, frame = open_view(args.run)
        if args.once:
            live.refresh()
            if args.json:
                print_json(live.state)
            else:
                console.print(frame())
        else:
            _follow(live, frame, console, interval)
        return 0 if live.is_successful else 1
    except KeyboardInterrupt:
        return 130


def port_number(text: str) -> int:
    port = int(text)
    if not 0 <= port <= MAX_PORT:
        raise argparse.ArgumentTypeError(f"must be a number from 0 to {MAX_PORT}, given: {text}")
    return port


def open_view(folder: str) -> tuple[LiveRun | LiveSweep, Callable[..., RenderableType]]:
    """Open a run, or a sweep if the folder contains several runs or the record of a sweep; errors are those of `find_runs`.

    Return it, and the function that returns its state as text, given the number of lines on the screen.
    """
    root, is_sweep = _find(folder)
    if is_sweep:
        from instrument.report.live_sweep import LiveSweep

        sweep = LiveSweep(folder)
        return sweep, sweep.frame
    from instrument.report.live_run import LiveRun, frame

    run = LiveRun(root)
    return run, partial(frame, run)


def _find(folder: str) -> tuple[Path, bool]:
    root = open_folder(folder)
    if (root / SWEEP_RECORD).exists():
        return root, True
    root, folders = find_runs(folder)
    return root, folders != [root]


def _follow(live: LiveRun | LiveSweep, frame: Callable[..., RenderableType], console: Console, interval: float) -> None:
    height = (lambda: console.height) if console.is_terminal else (lambda: None)
    seconds = OPENING_SECONDS
    with Live(console=console, auto_refresh=False) as shown:
        while True:
            began = time.process_time()
            live.refresh(seconds)
            is_over = not live.is_running and live.is_complete
            shown.update(frame(height()), refresh=True)
            if is_over:
                break
            if live.is_running:
                seconds = READING_SECONDS
                time.sleep(max(interval, PAUSE * (time.process_time() - began)))
    if not console.is_terminal:
        console.line()  # Live ends the last line only on a terminal


def _serve(folder: str, port: int, interval: float, *, takes_changes: bool) -> int:
    if takes_changes:
        check_is_local(folder, "--control", "a run can only be changed in its local folder")
    root, is_sweep = _find(folder)
    with packages_of("live", "--web"):
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    from instrument.report.live_server import LiveServer

    server = LiveServer(
        root,
        lambda seconds: max(interval, PAUSE * seconds),
        sweep=folder if is_sweep else None,
        opening_seconds=OPENING_SECONDS,
        reading_seconds=READING_SECONDS,
        takes_changes=takes_changes,
    )
    server.serve(port, lambda address: print(f"{address}\nCtrl-C ends the server.", flush=True))
    return 0


if __name__ == "__main__":
    os.nice(NICENESS)
    sys.exit(main())
