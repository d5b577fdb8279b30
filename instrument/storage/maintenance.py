"""Maintenance of runs that have ended: the rows of their journals become Parquet, and small parts are merged into large ones.

A merged part is written to a temporary file and renamed. Its name lists the parts that it replaces; from then on,
readers ignore those. They are removed afterwards. A reader whose part is gone lists the folder again. So every row is
readable exactly once at every moment, and the next run of this code removes what a killed process left.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..errors import first_line
from ..tables.schemas import TABLES, Table
from .checksums import LOCAL_FILES, REMEDY
from .journal_truncation_check import DAMAGED
from .parts import (
    JOURNALS,
    ROW_GROUP_BYTES,
    TENSOR_ROW_GROUP_ROWS,
    Part,
    block_files,
    convert_journal,
    in_order,
    journals_of,
    lost_journals,
    new_part,
    part_files,
    process_files,
    rows_written,
    written_parts,
)
from .remote_folder import moved_to

ROW_GROUP_ROWS = 131_072
MAX_PART_BYTES = 256 * 2**20  # The maximum size of a merged part, in bytes.


@dataclass
class RecoveryResult:
    """The result of a recovery."""

    rows: Counter[str] = field(default_factory=Counter)  # the number of rows that became Parquet, by table
    # Tables whose last step was incomplete when the process ended. Its incomplete message is discarded.
    torn: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # messages about unreadable data


def recover(folder: Path) -> RecoveryResult:
    """Convert all journals of a run without a process to parts, and remove its temporary files and allocated disk space.

    If a file cannot be written, the files not yet processed are unchanged.
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
    for file, *_ in process_files(folder):
        file.unlink()
    for block in block_files(folder).values():
        os.truncate(block, block.stat().st_size)  # releases the disk space after its end
    with suppress(OSError):  # a damaged journal is kept
        (folder / JOURNALS).rmdir()
    return result


@dataclass
class CompactionResult:
    """The numbers of Parquet files before and after, by table, and messages about unreadable files, which are kept."""

    before: Counter[str] = field(default_factory=Counter)
    after: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


def compact(folder: Path, ends: Sequence[Mapping[str, int]] = ()) -> CompactionResult:
    """Merge the parts of a run that no process is writing to.

    Args:
        folder: The folder of the run. The caller holds its lock.
        ends: By rank and table, the number of a part that must not be merged with the parts before it: a run that
            resumes from a checkpoint removes the parts from this number on.
    """
    result = CompactionResult()
    result.problems += recover(folder).problems
    for name, table in TABLES.items():
        result.before[name] = len(written_parts(folder, name))
        _remove_merged(folder, name)
        kept: set[Path] = set()  # parts to keep: just merged, or unreadable
        while (group := _first_mergeable(folder, table, [each.get(name, 0) for each in ends], kept)) is not None:
            try:
                kept.add(_merge(folder, table, group))
            except _UnreadableError as error:
                kept.add(error.file)
                result.problems.append(f"{error.file.relative_to(folder)}: {error}")
        result.after[name] = len(written_parts(folder, name))
    with suppress(OSError):  # a damaged journal is kept
        (folder / JOURNALS).rmdir()
    return result


class _UnreadableError(Exception):
    def __init__(self, file: Path, error: Exception) -> None:
        super().__init__(f"cannot be read: {first_line(error)}; the file is kept unchanged; {REMEDY}")
        self.file = file


def _first_mergeable(folder: Path, table: Table, ends: Sequence[int], kept: set[Path]) -> dict[Part, Path] | None:
    """Return the first consecutive parts to merge. A part that is larger than half the limit is kept as it is."""
    group: dict[Part, Path] = {}
    size = 0
    for part, file in part_files(folder, table.name).items():
        bytes_of = file.stat().st_size
        last = next(reversed(group), None)
        is_end = part.number in ends[part.rank : part.rank + 1]
        is_consecutive = last is not None and (last.rank, last.end) == (part.rank, part.number) and not is_end
        is_kept = file in kept or bytes_of > MAX_PART_BYTES / 2
        if is_kept or not is_consecutive or size + bytes_of > MAX_PART_BYTES:
            if len(group) > 1:
                return group
            group, size = {}, 0
        if not is_kept:
            group[part] = file
            size += bytes_of
    return group if len(group) > 1 else None


def _merge(folder: Path, table: Table, parts: Mapping[Part, Path]) -> Path:
    first, *_, last = parts
    merged = Part(first.rank, first.number, last.end - 1)
    with new_part(folder, table, merged, fsync=True) as writer:
        for group in _row_groups(table, _batches(table, parts.values())):
            writer.write_table(group)
    _remove_merged(folder, table.name)
    return merged.file(folder, table.name)


def _remove_merged(folder: Path, table: str) -> None:
    counted = part_files(folder, table)
    for part, file in written_parts(folder, table).items():
        if part not in counted:
            file.unlink()


def _batches(table: Table, files: Iterable[Path]) -> Iterator[pa.Table]:
    import pyarrow.dataset as ds  # imported late: it imports pandas, which a recovery does not need

    for file in files:
        try:
            content = ds.dataset(str(file), schema=table.schema, format="parquet", filesystem=LOCAL_FILES)
            if missing := set(pq.read_schema(str(file), filesystem=LOCAL_FILES).names) ^ set(table.schema.names):
                raise pa.ArrowInvalid(f"its columns differ: {', '.join(sorted(missing))}")
            for batch in content.to_batches(batch_size=ROW_GROUP_ROWS, batch_readahead=1, fragment_readahead=1):
                yield pa.Table.from_batches([batch])
        except (pa.ArrowException, OSError) as error:
            raise _UnreadableError(file, error) from error


def _row_groups(table: Table, pieces: Iterator[pa.Table]) -> Iterator[pa.Table]:
    """Split rows into row groups. Sorted tables are sorted; the rows of a step stay in one group if it is large enough."""
    max_rows = TENSOR_ROW_GROUP_ROWS if table.name == "tensors" else ROW_GROUP_ROWS
    pending: list[pa.Table] = []
    rows = size = 0
    for piece in pieces:
        pending.append(piece)
        rows, size = rows + piece.num_rows, size + piece.nbytes
        while rows > max_rows or (size >= ROW_GROUP_BYTES and not table.is_sorted):
            rows_so_far = _concatenated(table, pending)
            end = min(rows, max_rows)
            if table.is_sorted:  # the group ends with a complete step
                steps = rows_so_far.column("step").to_numpy()
                end = int(np.searchsorted(steps, steps[max_rows])) or max_rows
            yield rows_so_far.slice(0, end)
            pending = [rows_so_far.slice(end)]
            rows, size = rows - end, 0
    if rows:
        yield _concatenated(table, pending)


def _concatenated(table: Table, pieces: Sequence[pa.Table]) -> pa.Table:
    return in_order(table, pa.concat_tables(pieces).unify_dictionaries().combine_chunks())
