"""The folders of runs below a folder, or an address."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ..capture.tables import TABLES
from ..errors import InstrumentError
from ..sinks.parts import JOURNALS
from ..sinks.remote import is_address, opened

RUN_FILE = "run.json"


class NoRunError(InstrumentError):
    """There is no run in the folder, nor in any folder below it."""


def find_runs(path: str | Path) -> tuple[Path, list[Path]]:
    """The folder at a path or an address, and the folders of the runs in it.

    Raises:
        NoRunError: There is none.
        ConfigError: The address is none, or a package that reads from there is missing.
    """
    root = opened(path)
    folders = runs_in(root)
    if not folders:
        there = root.is_dir()
        raise NoRunError(f"no run.json in {root} or below it" if there else f"there is no folder {root}")
    return root, folders


def runs_in(root: Path) -> list[Path]:
    """The folder of a run itself, or those of all runs below it, job 10 behind job 9."""
    return [root] if (root / RUN_FILE).exists() else sorted(_runs_below(root), key=_natural)


def _runs_below(root: Path) -> Iterator[Path]:
    """The folders of runs, without a look into their tables or into folders whose name begins with a dot."""
    if is_address(root):
        found = (file.parent for file in root.rglob(RUN_FILE))
        yield from (
            folder for folder in found if not any(part.startswith(".") for part in folder.relative_to(root).parts)
        )
        return
    for above, folders, files in os.walk(root):
        is_run = RUN_FILE in files
        folders[:] = [
            name for name in folders if not (name.startswith(".") or (is_run and name in (*TABLES, JOURNALS)))
        ]
        if is_run:
            yield Path(above)


def _natural(path: Path) -> list[tuple[int, int | str]]:
    """A key that sorts job 10 behind job 9."""
    return [(0, int(part)) if part.isdigit() else (1, part) for part in path.parts]
