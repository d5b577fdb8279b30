"""Recovery of killed runs: the rows of their journals become Parquet."""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..tables.schemas import TABLES
from .journal_truncation_check import DAMAGED
from .parts import (
    JOURNALS,
    Part,
    block_files,
    convert_journal,
    disk_reserve_files,
    journals_of,
    lost_journals,
    new_part,
    part_files,
    row_counts_in,
    rows_written,
)
from .remote_folder import moved_to


@dataclass
class RecoveryResult:
    """The result of a recovery."""

    rows: Counter[str] = field(default_factory=Counter)  # the number of rows that became Parquet, by table
    # Tables whose last step was incomplete when the process ended. Its incomplete message is discarded.
    torn: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # messages about unreadable data


def recover(folder: Path) -> RecoveryResult:
    """Convert all journals of a run without a process to parts, and remove its temporary files and allocated disk space.

    Raises:
        OSError: A file cannot be written. The files not yet processed are unchanged.
    """
    result = RecoveryResult()
    for temporary in (folder / JOURNALS).glob("*.tmp"):
        temporary.unlink()
    written, damaged = rows_written(folder)
    result.problems += [f"{path.relative_to(folder)}: {DAMAGED}" for path in damaged]
    for (name, part), path in journals_of(folder).items():
        reading = convert_journal(folder, TABLES[name], part, written.get((name, part), 0))
        result.rows[name] += reading.rows
        if reading.torn:
            result.torn.append(name)
        if reading.problem is not None:
            result.problems.append(f"{path.relative_to(folder)}: {reading.problem}")
    for name in TABLES:
        lost = lost_journals(folder, name)
        result.problems += [f"{path.relative_to(folder)}: {problem}" for path, problem in lost.items()]
    is_moved = False  # tables without parts are then expected
    with suppress(OSError, ValueError, AttributeError):
        is_moved = moved_to(json.loads((folder / "run.json").read_text())) is not None
    for name, table in TABLES.items():
        if not part_files(folder, name) and not is_moved:
            with new_part(folder, table, Part(0, 0)):
                pass
    for file in (*disk_reserve_files(folder), *row_counts_in(folder)):
        file.unlink()
    for block in block_files(folder).values():
        os.truncate(block, block.stat().st_size)  # releases the disk space after its end
    with suppress(OSError):  # a damaged journal is kept
        (folder / JOURNALS).rmdir()
    return result
