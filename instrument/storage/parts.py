"""The files of a run: Parquet parts, one folder per table, and journals with the rows that are in no part yet.

    stats/part-0000-000000.parquet           rank, number
    stats/part-0000-000001-000007.parquet    parts 1 to 7 merged, see instrument.storage.maintenance
    blocks/block-0000-000000.raw             the bytes of recorded tensors, see instrument.storage.blocks
    journal/stats-0000-000008.arrows         the rows of the future part 8
    journal/stats-0000-000008.tmp            part 8 while it is being written
    journal/rows.0000                        number of rows in the journals of rank 0, see instrument.storage.journal_truncation_check

A part is written to a temporary file and renamed. Only then are the files that it replaces removed: the journal of its
rows, or the parts that were merged into it. A reader that lists journals first and parts second therefore finds every
row. If two files contain a row, the newer one counts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..tables.schemas import AS_WRITTEN, ORDER, TABLES, Table
from .checksums import add_checksums
from .journal import SUFFIX, JournalReader
from .journal_truncation_check import read_counts, truncation_problem
from .row_batches import as_table, joined, with_positions

JOURNALS, BLOCKS = "journal", "blocks"
DAMAGED = ".damaged"
OTHER_COLUMNS = "the columns differ from those of the table: the file is not read"
ROW_GROUP_ROWS = 16_384
TENSOR_ROW_GROUP_ROWS = 8_192  # the number of rows that are read to get one tensor
LISTING_SIZE = 256  # the number of files that the system lists in one call
ROW_GROUP_BYTES = 16 * 2**20  # of recorded values

_PART = re.compile(r"part-(\d{4})-(\d{6,})(?:-(\d{6,}))?\.parquet")
_BLOCK = re.compile(r"block-(\d{4})-(\d{6,})\.raw")
_PROCESS_FILE = re.compile(r"(rows|reserve)\.(\d{4})")
_JOURNAL = re.compile(rf"([a-z]+)-(\d{{4}})-(\d{{6,}})\{SUFFIX}")


class Part(NamedTuple):
    """One part of a table, or several merged ones."""

    rank: int  # the process that wrote it, from 0
    number: int  # the number of the part, or of the first merged one
    last: int = -1  # the number of the last merged one; -1 for a single part

    @property
    def end(self) -> int:
        """The number of the next part."""
        return max(self.number, self.last) + 1

    @property
    def name(self) -> str:
        """The rank and numbers as they occur in file names."""
        return f"{self.rank:04d}-{self.number:06d}" + (f"-{self.last:06d}" if self.last > self.number else "")

    def covers(self, other: Part) -> bool:
        """Return whether this part contains all rows of another one."""
        return self.rank == other.rank and self.number <= other.number and other.end <= self.end

    def file(self, folder: Path, table: str) -> Path:
        """Return its Parquet file."""
        return folder / table / f"part-{self.name}.parquet"

    def block(self, folder: Path) -> Path:
        """Return the block file that was begun before this part of `tensors` was written."""
        return folder / BLOCKS / f"block-{self.name}.raw"

    def journal(self, folder: Path, table: str) -> Path:
        """Return the journal of its rows, which exists until the Parquet file does."""
        return folder / JOURNALS / f"{table}-{self.name}{SUFFIX}"


def part_files(folder: Path, table: str) -> dict[Part, Path]:
    """Return the Parquet files of a table in order, without those whose rows are in a merged part."""
    files: dict[Part, Path] = {}
    latest: Part | None = None
    for part, file in written_parts(folder, table).items():
        if latest is None or not latest.covers(part):
            files[part], latest = file, part
    return files


def written_parts(folder: Path, table: str) -> dict[Part, Path]:
    """Return all Parquet files of a table in order. A merged part comes before the parts that it replaces."""
    matches = _matches(_PART, folder / table)
    parts = [Part(int(match[1]), int(match[2]), int(match[3] or -1)) for match in matches]
    return {part: part.file(folder, table) for part in sorted(parts, key=lambda each: (*each[:2], -each.end))}


def block_files(folder: Path, *, ended: bool = False) -> dict[Part, Path]:
    """Return the block files of a run in order; with `ended`, those that do not grow any more."""
    parts = sorted(Part(int(match[1]), int(match[2])) for match in _matches(_BLOCK, folder / BLOCKS))
    ends = {part.rank: part.end for part in part_files(folder, "tensors")} if ended else {}
    return {part: part.block(folder) for part in parts if not ended or part.number < ends.get(part.rank, 0)}


def _matches(pattern: re.Pattern[str], folder: Path) -> list[re.Match[str]]:
    return [match for name in names_in(folder) if (match := pattern.fullmatch(name))]


def names_in(folder: Path) -> list[str]:
    """Return the names of the files in a folder at one moment.

    The system lists a large folder in several calls. In between, a merged part can appear and the parts that it
    replaces can disappear, so the folder is listed until two listings agree.
    """
    try:
        names = [file.name for file in folder.iterdir()]
        while len(names) > LISTING_SIZE and names != (names := [file.name for file in folder.iterdir()]):
            pass
    except (FileNotFoundError, NotADirectoryError):
        return []
    return names


def journals_of(folder: Path, table: str | None = None) -> dict[tuple[str, Part], Path]:
    """Return the journals of a table, or of all tables, in order. The rows of some may already be in a part."""
    found = [(match[1], Part(int(match[2]), int(match[3]))) for match in _matches(_JOURNAL, folder / JOURNALS)]
    known = (key for key in sorted(found) if key[0] in TABLES and table in (None, key[0]))
    return {(name, part): part.journal(folder, name) for name, part in known}


def process_file(folder: Path, kind: Literal["rows", "reserve"], rank: int) -> Path:
    """Return the row count file of a process, or the file that reserves disk space for it, see `instrument.storage.parquet`."""
    return folder / JOURNALS / f"{kind}.{rank:04d}"


def process_files(folder: Path) -> list[tuple[Path, str, int]]:
    """Return the files of `process_file` of all processes, each with its kind and its rank."""
    matches = _matches(_PROCESS_FILE, folder / JOURNALS)
    return [(folder / JOURNALS / match[0], match[1], int(match[2])) for match in matches]


def rows_written(folder: Path) -> tuple[dict[tuple[str, Part], int], list[Path]]:
    """Return the minimum number of rows written to each journal, by table and part, and the damaged row count files."""
    counts: dict[tuple[str, Part], int] = {}
    damaged = []
    for path, kind, rank in process_files(folder):
        known = read_counts(path) if kind == "rows" else {}
        if known is None:
            damaged.append(path)
        counts |= {(table, Part(rank, number)): rows for (table, number), rows in (known or {}).items()}
    return counts, damaged


def lost_journals(folder: Path, table: str) -> dict[Path, str]:
    """Return the missing journals of a table whose rows are in no part, each with a message."""

    def missing() -> dict[Path, str]:
        written, _ = rows_written(folder)
        return {
            part.journal(folder, name): f"the file is missing, with {rows:,} rows"
            for (name, part), rows in written.items()
            if name == table
            and not part.journal(folder, name).exists()
            and not any(later.covers(part) for later in part_files(folder, name))
        }

    lost = missing()
    # Checked twice: a run that resumes removes journals in between.
    return {path: problem for path, problem in missing().items() if path in lost} if lost else {}


def foreign_files(folder: Path, subfolder: str) -> list[Path]:
    """Return the files in a folder of a run that no run has written and no reader uses."""
    names = names_in(folder / subfolder)
    if not names or (subfolder != JOURNALS and all(_PART.fullmatch(name) for name in names)):
        return []  # a shortcut: there may be thousands of runs
    listed = journals_of(folder) if subfolder == JOURNALS else written_parts(folder, subfolder)
    known_files = {*listed.values(), *(file for file, *_ in process_files(folder))}
    present = (Path(above, name) for above, _, names in os.walk(folder / subfolder) for name in names)
    return sorted(file for file in present if not (file in known_files or file.suffix == ".tmp"))


def read_journal(
    table: Table, path: Path, *, exclusive: bool = False, after: JournalReader | None = None
) -> JournalReader:
    """Open a journal of a table, see `JournalReader.of`. If it has other columns than the table, it has no batches."""
    reading = JournalReader.of(path, exclusive=exclusive, after=after)
    if reading.schema is not None and not {*reading.schema} <= {*table.plain_schema}:
        reading.problem = OTHER_COLUMNS
    return reading


def convert_journal(folder: Path, table: Table, part: Part, written: int, *, fsync: bool = False) -> JournalReader:
    """Convert a journal to a part and remove it. A damaged journal is kept under another name.

    Args:
        written: The minimum number of rows that were written to the journal; 0 if unknown.
        fsync: Whether the part survives a power failure. Default: False.

    Returns:
        The content of the journal, with a message about unreadable data.
    """
    journal = part.journal(folder, table.name)
    reading = read_journal(table, journal, exclusive=True)
    if not any(later.covers(part) for later in part_files(folder, table.name)):
        with new_part(folder, table, part, fsync=fsync) as writer:
            write_rows(writer, table, (with_positions(table, *each) for each in reading.stacks()))
        reading.problem = reading.problem or truncation_problem(reading.rows, written)
    if reading.problem is None:
        journal.unlink()
    else:
        journal.rename(journal.with_suffix(DAMAGED))
    return reading


def write_rows(writer: pq.ParquetWriter, table: Table, batches: Iterator[pa.RecordBatch]) -> None:
    """Write plain rows with their positions to a part, in row groups."""
    max_rows = TENSOR_ROW_GROUP_ROWS if table.name == "tensors" else ROW_GROUP_ROWS
    for group in grouped(batches, max_rows, ROW_GROUP_BYTES):
        rows = in_order(table, as_table(table, joined(group).combine_chunks()))
        writer.write_table(rows, row_group_size=2 * ROW_GROUP_ROWS)  # a step may have more rows


def remove_rows_after_checkpoint(folder: Path, rank: int, counts: Mapping[str, int]) -> None:
    """Remove the parts, journals and temporary files that one process wrote after each table had a certain number of parts.

    Raise an OSError if a merged part contains rows to keep and rows to remove.
    """
    # Removed first: as long as it exists, missing journals are reported.
    process_file(folder, "rows", rank).unlink(missing_ok=True)
    for file in files_after(folder, rank, counts, OSError):
        file.unlink()
    for (_, part), file in journals_of(folder).items():
        if part.rank == rank:
            file.unlink()
    for temporary in (folder / JOURNALS).glob("*.tmp"):
        temporary.unlink(missing_ok=True)  # another process may have removed it


def files_after(folder: Path, rank: int, counts: Mapping[str, int], error: type[Exception]) -> Iterator[Path]:
    """Yield the parts and block files of one process after a number of parts per table. Raise `error` if one mixes rows."""
    for name in TABLES:
        kept = counts.get(name, 0)  # a checkpoint of an earlier version lacks newer tables
        blocks = block_files(folder) if name == "tensors" else {}
        for part, file in (*written_parts(folder, name).items(), *blocks.items()):
            if part.rank == rank and part.number >= kept:
                yield file
            elif part.rank == rank and part.end > kept:
                raise error(f"cannot resume from this checkpoint: {file} mixes rows from before and after it")


def in_order(table: Table, rows: pa.Table) -> pa.Table:
    """Sort rows as in the files of the table. Rows of one step and layer keep their order."""
    return _sorted_by(rows, ORDER) if table.is_sorted else rows


def as_written(rows: pa.Table) -> pa.Table:
    """Sort the rows of a sorted table in the order in which they were written. Rows without a position keep their order."""
    return _sorted_by(rows, AS_WRITTEN)


def _sorted_by(rows: pa.Table, names: Iterable[str]) -> pa.Table:
    columns = {name: rows.column(name) for name in names}
    keys = {name: c.cast(c.type.value_type) if pa.types.is_dictionary(c.type) else c for name, c in columns.items()}
    return rows.take(pc.sort_indices(pa.table(keys), [(name, "ascending") for name in keys]))


def grouped(batches: Iterator[pa.RecordBatch], max_rows: int, max_bytes: int) -> Iterator[list[pa.RecordBatch]]:
    """Group batches until a group has a number of rows or of bytes.

    Sizes are those of the buffers, including padding, because `nbytes` of a batch takes much longer to compute.
    """
    group: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        group.append(batch)
        rows, size = rows + batch.num_rows, size + batch.get_total_buffer_size()
        if rows >= max_rows or size >= max_bytes:
            yield group
            group, rows, size = [], 0, 0
    if rows:
        yield group


@contextmanager
def new_part(folder: Path, table: Table, part: Part, *, fsync: bool = False) -> Iterator[pq.ParquetWriter]:
    """Create a part. It is renamed to its final name when the block ends; after an error, no file remains."""
    temporary, file = part.journal(folder, table.name).with_suffix(".tmp"), part.file(folder, table.name)
    file.parent.mkdir(exist_ok=True)
    temporary.parent.mkdir(exist_ok=True)
    try:
        with pq.ParquetWriter(temporary, table.schema, **_options(table)) as writer:
            yield writer
        add_checksums(temporary)
        if fsync:
            _sync(temporary)
        os.replace(temporary, file)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    if fsync:
        _sync(file.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _options(table: Table) -> dict[str, Any]:
    labels = [column.name for column in table.columns if pa.types.is_dictionary(column.type)]
    options: dict[str, Any] = {"use_dictionary": labels, "write_page_checksum": True}
    options |= {"compression": "zstd", "compression_level": 1}
    if table.is_sorted:
        options["sorting_columns"] = [pq.SortingColumn(table.schema.get_field_index(name)) for name in ORDER]
    if table.name == "tensors":
        # Dictionaries and statistics of recorded values cost more than the values. Only labels have them.
        options |= {"compression": "none", "compression_level": None, "write_statistics": ["step", *labels]}
    return options
