"""Search for the folders of runs below a local or remote folder."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

from ..errors import ConfigError, InstrumentError, Problem
from ..formatting import natural_key
from ..tables.schemas import TABLES
from .parts import JOURNALS
from .remote_folder import is_address, open_folder

RUN_FILE = "run.json"
CERTIFICATE = "certificate.json"  # of `verify`, in the folder of its job
REPORT_FILE = "report.html"  # relative to the folder of a run or a sweep


class NoRunError(InstrumentError):
    """The folder does not exist, or neither it nor any folder below it contains a run."""

    exit_code = 2


def find_runs(path: str | Path) -> tuple[Path, list[Path]]:
    """Return the opened folder, see `open_folder`, and the folders of the runs: itself, or all below it in natural order.

    Raises:
        NoRunError: The folder does not exist or contains no run.
        ConfigError: The path has a wrong type, the address is invalid, or a package needed to read from it is not installed.
    """
    if not (isinstance(path, str | os.PathLike) or is_address(path)):
        fix = "for a probe, pass probe.run or the folder of its run"
        raise ConfigError(Problem("path", "must be a folder", type(path).__name__, fix=fix))
    root = open_folder(path)
    folders = [root] if (root / RUN_FILE).exists() else sorted(_runs_below(root), key=natural_key)
    if not folders:
        missing = "not a folder" if root.exists() else "folder not found"
        by_verify = ": verify wrote it, and keeps no rows" if (root / CERTIFICATE).is_file() else ""
        raise NoRunError(f"no run.json in or below {root}{by_verify}" if root.is_dir() else f"{missing}: {root}")
    return root, folders


def _runs_below(root: Path) -> Iterator[Path]:
    """Yield the folders of runs; folders of tables and folders whose name begins with a dot are skipped."""
    if is_address(root):
        run_folders = (file.parent for file in root.rglob(RUN_FILE))
        yield from (each for each in run_folders if not any(part[:1] == "." for part in each.relative_to(root).parts))
        return
    for above, folders, files in os.walk(root):
        is_run = RUN_FILE in files
        folders[:] = [
            name for name in folders if not (name.startswith(".") or (is_run and name in (*TABLES, JOURNALS)))
        ]
        if is_run:
            yield Path(above)


def report_command(folder: Path) -> str:
    """Return the command that writes the report of a run or a sweep, of a remote one to the current directory."""
    out = f" --out {REPORT_FILE}" if is_address(folder) else ""
    return f"python -m instrument.report {shlex.quote(str(folder))}{out}"
