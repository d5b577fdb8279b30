"""`python -m instrument.recover RUN ...`: convert the journals of killed runs to Parquet.

`instrument.load` also reads journals, so this is only needed for programs that read Parquet only.

Exit codes: 0, everything is Parquet; 1, a run is in progress, not writable, or has a damaged journal; 2, there is no
run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from instrument.commands.locked_operations import for_each_run, parser_of_runs
from instrument.storage.maintenance import recover
from instrument.storage.run_record import end_if_running

command_line = partial(parser_of_runs, "recover")


def main(arguments: Sequence[str] | None = None) -> int:
    return for_each_run(command_line().parse_args(arguments).runs, _recover, reason="a remote folder has no journals")


def _recover(folder: Path) -> tuple[str, Sequence[str]]:
    recovered = recover(folder)
    end_if_running(folder, status="killed")
    rows = ", ".join(f"{table} {count:,}" for table, count in recovered.rows.items())
    torn = f"; the incomplete last step was discarded ({', '.join(recovered.torn)})" if recovered.torn else ""
    return f"{f'rows converted to Parquet: {rows}' if rows else 'no journals to convert'}{torn}", recovered.problems


if __name__ == "__main__":
    sys.exit(main())
