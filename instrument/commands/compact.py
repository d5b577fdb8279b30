"""`python -m instrument.compact RUN ...`: merge the small Parquet files of runs into large ones.

Runs can be read while their files are merged. Journals of killed runs are converted to Parquet first.

Exit codes: 0, everything was merged; 1, a run is in progress, not writable, or has unreadable files; 2, there is no
run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from instrument.commands.locked_operations import for_each_run, parser_of_runs
from instrument.errors import ConfigError
from instrument.storage.maintenance import compact
from instrument.storage.run_record import CHECKPOINTS

command_line = partial(parser_of_runs, "compact")


def main(arguments: Sequence[str] | None = None) -> int:
    runs = command_line().parse_args(arguments).runs
    return for_each_run(runs, _compact, reason="a remote folder cannot be compacted")


def _compact(folder: Path) -> tuple[str, Sequence[str]]:
    parts: list[dict[str, int]] = []  # of each process and table, at the checkpoint used for resuming
    if (folder / CHECKPOINTS).is_dir():
        from instrument.training.checkpoint import Checkpoints  # imported here, because it imports torch

        with suppress(ConfigError):  # the run has no checkpoint
            parts = Checkpoints(folder).load()["parts"]
    result = compact(folder, parts)
    merged = {name: count for name, count in result.before.items() if count != result.after[name]}
    counts = (f"{name} from {count:,} to {result.after[name]:,}" for name, count in merged.items())
    return f"files merged: {', '.join(counts)}" if merged else "nothing to merge", result.problems


if __name__ == "__main__":
    sys.exit(main())
