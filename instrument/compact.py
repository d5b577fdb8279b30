"""`python -m instrument.compact FOLDER ...`: the small Parquet files of runs merged into large ones.

A run may be read meanwhile. Journals that a killed run left become Parquet first.

Exit code 0: all is merged; 1: a run is still written to, cannot be written, or has files that cannot be read; 2: there is no
run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from .errors import ConfigError
from .run.folder import CHECKPOINTS
from .run.upkeep import each_run
from .sinks.compaction import compact


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; gives the exit code."""
    return each_run(
        arguments,
        _compact,
        name="compact",
        description="Merge the small Parquet files of runs into large ones.",
        metavar="FOLDER",
        reason="files are merged where they can be renamed",
    )


def _compact(folder: Path) -> tuple[str, Sequence[str]]:
    found = compact(folder, _ends(folder))
    merged = {name: count for name, count in found.before.items() if count != found.after[name]}
    told = ", ".join(f"{count:,} of {name} are {found.after[name]:,} now" for name, count in merged.items())
    return told or "nothing to merge", found.problems


def _ends(folder: Path) -> list[dict[str, int]]:
    """How many parts of each table each process had written at the checkpoint that the run would go on from."""
    if not (folder / CHECKPOINTS).is_dir():
        return []
    from .run.checkpoint import Checkpoints  # with PyTorch, which reads them

    with suppress(ConfigError):  # there is none
        parts: list[dict[str, int]] = Checkpoints(folder).load()["parts"]
        return parts
    return []


if __name__ == "__main__":
    sys.exit(main())
