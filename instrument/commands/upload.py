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

from instrument.commands.locked_operations import locked
from instrument.commands.verbs import parser_of, with_exit_codes
from instrument.errors import ConfigError, InstrumentError, Problem
from instrument.formatting import human_bytes
from instrument.storage.lock import is_written
from instrument.storage.recovery import recover
from instrument.storage.remote_errors import safe_message
from instrument.storage.remote_folder import RemoteFolder, check_is_local, remote_address_of
from instrument.storage.remote_transfer import send_all
from instrument.storage.run_record import end_if_running, read_record
from instrument.storage.run_search import find_runs


def command_line() -> argparse.ArgumentParser:
    """Return the parser of the arguments."""
    parser = parser_of("upload")
    parser.add_argument(
        "run", metavar="RUN", type=Path, help="the folder of a run, or a folder that contains several runs"
    )
    parser.add_argument(
        "remote",
        metavar="REMOTE",
        nargs="?",
        help="the remote folder, such as s3://bucket/prefix (default: sink.remote of the run)",
    )
    return parser


@with_exit_codes
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    args = command_line().parse_args(arguments)
    check_is_local(args.run, "RUN", "must be a local folder", fix="pass a local folder")
    places = [(folder, _remote(folder, args.remote)) for folder in find_runs(args.run)[1]]
    return max(_send(folder, remote) for folder, remote in places)


def _remote(folder: Path, remote: str | None) -> RemoteFolder:
    if remote is not None:
        return RemoteFolder(remote_address_of(folder, remote), "REMOTE")
    address = read_record(folder, "RUN").get("remote")
    if not address:
        message = "is missing: the run was started without sink.remote"
        fix = "run python -m instrument.upload RUN s3://bucket/prefix"
        raise ConfigError(Problem("REMOTE", message, given=str(folder), fix=fix))
    return RemoteFolder(address, "RUN")


def _send(folder: Path, remote: RemoteFolder) -> int:
    running = is_written(folder)
    try:
        if not running:
            with locked(folder):
                recover(folder)
                end_if_running(folder, status="killed")
        sent = send_all(folder, remote)
    except InstrumentError as error:
        print(f"{folder}: {error}", file=sys.stderr)
        return error.exit_code
    except Exception as error:  # storage clients raise many types of errors
        print(f"{folder}: {remote.address}: {safe_message(error)}", file=sys.stderr)
        return 1
    print(
        f"{folder}: {f'{sent.files} files' if sent.files else 'no new files'} uploaded to {remote.address}, "
        f"{human_bytes(sent.bytes)}"
    )
    for name, problem in sent.failed.items():
        print(f"{folder}: {name} is missing: {problem}", file=sys.stderr)
    if running:
        print(f"{folder}: the run is in progress: its journals were not uploaded", file=sys.stderr)
    return 1 if sent.failed or running else 0


if __name__ == "__main__":
    sys.exit(main())
