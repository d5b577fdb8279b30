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
from functools import partial
from pathlib import Path

from instrument.commands.locked_operations import apply_locked
from instrument.commands.verbs import parser_of, with_arguments
from instrument.errors import ConfigError, InstrumentError, Problem
from instrument.formatting import human_bytes
from instrument.storage.maintenance import recover
from instrument.storage.remote_folder import RemoteFolder, check_is_local, remote_address_of, safe_message
from instrument.storage.remote_transfer import send_all
from instrument.storage.run_record import end_if_running, read_record
from instrument.storage.run_search import find_runs


def command_line() -> argparse.ArgumentParser:
    parser = parser_of("upload")
    text = "the folder of a run, or a folder that contains several runs"
    parser.add_argument("run", metavar="RUN", type=Path, help=text)
    text = "the remote folder, such as s3://bucket/prefix (default: sink.remote of the run)"
    parser.add_argument("remote", metavar="REMOTE", nargs="?", help=text)
    return parser


@with_arguments(command_line)
def main(args: argparse.Namespace) -> int:
    check_is_local(args.run, "RUN", "must be a local folder", fix="pass a local folder")
    places = [(folder, _remote(folder, args.remote)) for folder in find_runs(args.run)[1]]
    return max(apply_locked(folder, partial(_send, remote=remote)) for folder, remote in places)


def _remote(folder: Path, remote: str | None) -> RemoteFolder:
    if remote is not None:
        return RemoteFolder(remote_address_of(folder, remote), "REMOTE")
    address = read_record(folder, "RUN").get("remote")
    if not address:
        message = "is missing: the run was started without sink.remote"
        fix = "run python -m instrument.upload RUN s3://bucket/prefix"
        raise ConfigError(Problem("REMOTE", message, given=str(folder), fix=fix))
    return RemoteFolder(address, "RUN")


def _send(folder: Path, remote: RemoteFolder) -> tuple[str, Sequence[str]]:
    recover(folder)
    end_if_running(folder, status="killed")
    try:
        sent = send_all(folder, remote)
    except InstrumentError:
        raise
    except Exception as error:  # storage clients raise many types of errors
        raise InstrumentError(f"{remote.address}: {safe_message(error)}") from error
    files = f"{sent.files} files" if sent.files else "no new files"
    missing = [f"{name} is missing: {problem}" for name, problem in sent.failed.items()]
    return f"{files} uploaded to {remote.address}, {human_bytes(sent.bytes)}", missing


if __name__ == "__main__":
    sys.exit(main())
