"""`python -m instrument.compact RUN ...`: merge the small Parquet files of runs into large ones.

Runs can be read while their files are merged. Journals of killed runs are converted to Parquet first.

Exit codes: 0, everything was merged; 1, a run is in progress, not writable, or has unreadable files; 2, there is no
run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from instrument.commands.locked_operations import for_each_run, parser_of_runs
from instrument.errors import ConfigError
from instrument.storage.maintenance import compact
from instrument.storage.run_record import CHECKPOINTS


def command_line() -> argparse.ArgumentParser:
    return parser_of_runs("compact")


def main(arguments: Sequence[str] | None = None) -> int:
    runs = command_line().parse_args(arguments).runs
    return for_each_run(runs, _compact, reason="a remote folder cannot be compacted")


def _compact(folder: Path) -> tuple[str, Sequence[str]]:
    result = compact(folder, _parts_at_checkpoint(folder))
    merged = {name: count for name, count in result.before.items() if count != result.after[name]}
    counts = (f"{name} from {count:,} to {result.after[name]:,}" for name, count in merged.items())
    return f"files merged: {', '.join(counts)}" if merged else "nothing to merge", result.problems


def _parts_at_checkpoint(folder: Path) -> list[dict[str, int]]:
    """Return how many parts of each table each process had written at the checkpoint used for resuming."""
    if not (folder / CHECKPOINTS).is_dir():
        return []
    from instrument.training.checkpoint import Checkpoints  # imported here, because reading checkpoints imports torch

    with suppress(ConfigError):  # the run has no checkpoint
        parts: list[dict[str, int]] = Checkpoints(folder).load()["parts"]
        return parts
    return []


if __name__ == "__main__":
    sys.exit(main())
