"""`python -m instrument.upload RUN [REMOTE]`: send the files of a run, or of all runs in a folder, to a remote folder.

Files that are already in the remote folder are not sent again. Without REMOTE a run is sent to its own `sink.remote`.
With REMOTE the path below REMOTE is the path of the run below `runs`. Journals of killed runs are converted to Parquet
first.

Exit codes: 0, all files are sent; 1, a file is missing or the run is in progress; 2, the arguments are invalid.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .analysis.folders import NoRunError, find_runs
from .errors import ConfigError, InstrumentError, Mistake
from .folders.maintenance import held
from .folders.run_folder import mark_killed, read_record
from .formatting import human_bytes
from .sinks.client_errors import told
from .sinks.lock import is_written
from .sinks.recovery import recover
from .sinks.remote import RemoteFolder, place_of, refuse_address
from .sinks.transfer import send_all


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m instrument.upload", description="Send runs to a remote folder.")
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder, or one above several")
    parser.add_argument(
        "remote", metavar="REMOTE", nargs="?", help="such as s3://bucket/prefix; the run's own without it"
    )
    asked = parser.parse_args(arguments)
    try:
        refuse_address(asked.run, "RUN", "runs are sent from where they were made", allowed="a folder of this machine")
        places = [(folder, _remote(folder, asked.remote)) for folder in find_runs(asked.run)[1]]
    except (NoRunError, ConfigError) as error:
        print(error, file=sys.stderr)
        return 2
    return max(_send(folder, remote) for folder, remote in places)


def _remote(folder: Path, remote: str | None) -> RemoteFolder:
    if remote is not None:
        return RemoteFolder(place_of(folder, remote), "REMOTE")
    address = read_record(folder, "RUN").get("remote")
    if not address:
        raise ConfigError(
            Mistake(
                "REMOTE",
                "the run has no remote folder of its own: it was started without",
                written=str(folder),
                allowed="python -m instrument.upload RUN s3://bucket/prefix",
            )
        )
    return RemoteFolder(address, "RUN")


def _send(folder: Path, remote: RemoteFolder) -> int:
    running = is_written(folder)
    try:
        if not running:
            with held(folder):
                recover(folder)
                mark_killed(folder)
        sent = send_all(folder, remote)
    except InstrumentError as error:
        print(f"{folder}: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:  # storage clients raise many types of errors
        print(f"{folder}: {remote.address}: {told(error)}", file=sys.stderr)
        return 1
    print(
        f"{folder}: {f'{sent.files} files sent' if sent.files else 'all is there already'}, {human_bytes(sent.bytes)}, to {remote.address}"
    )
    for name, problem in sent.missing.items():
        print(f"{folder}: {name} is not there: {problem}", file=sys.stderr)
    if running:
        print(f"{folder}: still running; what is in its journals is left for later", file=sys.stderr)
    return 1 if sent.missing or running else 0


if __name__ == "__main__":
    sys.exit(main())
