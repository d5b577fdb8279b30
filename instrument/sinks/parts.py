"""The files of a run: Parquet parts, one folder a table, and the journals of what is in no part yet.

    stats/part-0000-000000.parquet           rank, number
    stats/part-0000-000001-000007.parquet    parts 1 to 7 in one, see instrument.sinks.compaction
    journal/stats-0000-000008.arrows         the rows that will be part 8
    journal/stats-0000-000008.tmp            part 8 while it is written
    journal/rows.0000                        how many rows there are in the journals of rank 0, see instrument.sinks.row_counts

A part is written aside and put into its place by renaming; only then is what it takes the place of removed: the journal of
its rows, or the parts that were merged to it. So whoever looks for journals first, and for parts then, meets every row, and
of two files that have a row the one that came later counts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ..capture.tables import AS_WRITTEN, ORDER, TABLES, Table, as_table, placed
from .journal import SUFFIX, Reading
from .row_counts import NAME, cut_short

JOURNALS = "journal"
DAMAGED = ".damaged"
OTHER_COLUMNS = "the columns are not those of this table: it is not read"
ROW_GROUP_ROWS = 32_768
TENSORS_ROWS = 8_192  # of the table of tensors: who wants one of them reads a row group
AT_ONCE = 256  # files of a folder that the system lists in one go
JOINED, JOINED_BYTES = 64, 2**20  # batches, and bytes of the last of them, that are joined to one
ROW_GROUP_BYTES = 16 * 2**20  # of recorded values

_PART = re.compile(r"part-(\d{4})-(\d{6,})(?:-(\d{6,}))?\.parquet")
_JOURNAL = re.compile(rf"([a-z]+)-(\d{{4}})-(\d{{6,}})\{SUFFIX}")


class Part(NamedTuple):
    """One part of a table, or several that were merged: which process wrote it, and which in order."""

    rank: int
    number: int
    last: int = -1  # of those that were merged to it; -1 where it is one

    @property
    def end(self) -> int:
        """The number of the part that comes next."""
        return max(self.number, self.last) + 1

    @property
    def name(self) -> str:
        """Its rank and numbers, as files have them in their names."""
        return f"{self.rank:04d}-{self.number:06d}" + (f"-{self.last:06d}" if self.last > self.number else "")

    def covers(self, other: Part) -> bool:
        """Whether the other's rows are all in this one."""
        return self.rank == other.rank and self.number <= other.number and other.end <= self.end

    def file(self, folder: Path, table: str) -> Path:
        """Its Parquet file."""
        return folder / table / f"part-{self.name}.parquet"

    def journal(self, folder: Path, table: str) -> Path:
        """The journal of its rows, as long as there is no file."""
        return folder / JOURNALS / f"{table}-{self.name}{SUFFIX}"

    def aside(self, folder: Path, table: str) -> Path:
        """Its file while it is written."""
        return self.journal(folder, table).with_suffix(".tmp")


def parts_of(folder: Path, table: str) -> dict[Part, Path]:
    """The Parquet files of a table, in order, without those whose rows are in a merged one."""
    found: dict[Part, Path] = {}
    latest: Part | None = None
    for part, file in written_parts(folder, table).items():
        if latest is None or not latest.covers(part):
            found[part], latest = file, part
    return found


def written_parts(folder: Path, table: str) -> dict[Part, Path]:
    """All Parquet files of a table, in order, a merged one before those that it was made of."""
    found = {}
    for name in names_in(folder / table):
        if match := _PART.fullmatch(name):
            found[Part(int(match[1]), int(match[2]), int(match[3] or -1))] = folder / table / name
    return dict(sorted(found.items(), key=lambda item: (item[0].rank, item[0].number, -item[0].end)))


def names_in(folder: Path) -> list[str]:
    """The names of what is in a folder at one moment: the system lists many files in several goes, between which a merged
    one can come and those that it was made of can go."""
    try:
        names = [file.name for file in folder.iterdir()]
        while len(names) > AT_ONCE and names != (names := [file.name for file in folder.iterdir()]):
            pass
    except (FileNotFoundError, NotADirectoryError):
        return []
    return names


def journals_of(folder: Path, table: str | None = None) -> dict[tuple[str, Part], Path]:
    """The journals of a table, or of all tables, in order; some may be of rows that are in a part already."""
    found = {}
    for name in names_in(folder / JOURNALS):
        match = _JOURNAL.fullmatch(name)
        if match and match[1] in TABLES and table in (None, match[1]):
            found[match[1], Part(int(match[2]), int(match[3]))] = folder / JOURNALS / name
    return dict(sorted(found.items()))


def reserve_of(folder: Path, rank: int) -> Path:
    """What a process keeps of the disk, see `instrument.sinks.parquet`."""
    return folder / JOURNALS / f"reserve.{rank:04d}"


def reserves_of(folder: Path) -> list[Path]:
    """What all processes of a run keep of the disk."""
    return list((folder / JOURNALS).glob("reserve.*"))


def row_counts_of(folder: Path, rank: int) -> Path:
    """Where a process writes down how many rows its journals hold."""
    return folder / JOURNALS / f"rows.{rank:04d}"


def foreign_files(folder: Path, place: str) -> list[Path]:
    """Files in the folder of a table, or in that of the journals, that no run has put there, and that nothing here reads."""
    names = names_in(folder / place)
    if not names or (place != JOURNALS and all(_PART.fullmatch(name) for name in names)):
        return []  # at once: there may be thousands of runs
    ours = journals_of(folder) if place == JOURNALS else written_parts(folder, place)
    known = {*ours.values(), *reserves_of(folder)}
    found = (Path(above, name) for above, _, names in os.walk(folder / place) for name in names)
    return sorted(file for file in found if not (file in known or file.suffix == ".tmp" or NAME.fullmatch(file.name)))


def settle(folder: Path, table: Table, part: Part, written: int, *, fsync: bool = False) -> Reading:
    """Make a part of its journal, and remove the journal; one that is damaged is kept under another name.

    Args:
        folder: The run's folder.
        table: Which table.
        part: The part.
        written: How many rows were written to the journal, at least; 0 where nobody knows.
        fsync: Whether the part is to outlive a power failure.

    Returns:
        What was found in the journal, with what could not be read of it.

    Raises:
        OSError: The part cannot be written; the journal is left as it is.
    """
    journal = part.journal(folder, table.name)
    reading = Reading.of(journal, ours=True)
    if reading.schema is not None and reading.schema != table.plain_schema:
        reading.problem = OTHER_COLUMNS
    if not any(later.covers(part) for later in parts_of(folder, table.name)):
        usable = reading.batches() if reading.schema == table.plain_schema else iter(())
        with new_part(folder, table, part, fsync=fsync) as writer:
            most = TENSORS_ROWS if table.name == "tensors" else ROW_GROUP_ROWS
            for group in _groups(_joined(placed(table, batch) for batch in usable), most):
                rows = in_order(table, as_table(table, pa.Table.from_batches(group)))
                writer.write_table(rows, row_group_size=2 * ROW_GROUP_ROWS)  # a step may have more
        reading.problem = reading.problem or cut_short(reading.rows, written)
    if reading.problem is None:
        journal.unlink()
    else:
        journal.rename(journal.with_suffix(DAMAGED))
    return reading


def rewind(folder: Path, rank: int, counts: Mapping[str, int]) -> None:
    """Take away what one process wrote after each table had so many parts: later parts, journals, and what is half-done.

    Raises:
        OSError: It cannot be taken away.
    """
    row_counts_of(folder, rank).unlink(
        missing_ok=True
    )  # first: a journal that is gone is missed as long as it is there
    for name in TABLES:
        for part, file in written_parts(folder, name).items():
            if part.rank == rank and part.number >= counts[name]:
                file.unlink()
            elif part.rank == rank and part.end > counts[name]:
                raise OSError(f"{file} holds rows of before and after the checkpoint: it was merged for another one")
    for (_, part), file in journals_of(folder).items():
        if part.rank == rank:
            file.unlink()
    for aside in (folder / JOURNALS).glob("*.tmp"):
        aside.unlink(missing_ok=True)  # another process may have


def in_order(table: Table, rows: pa.Table) -> pa.Table:
    """Rows sorted as the files of their table are; those of one step and layer stay as they come."""
    if not table.is_sorted:
        return rows
    keys = pa.table({name: _plain(rows.column(name)) for name in ORDER})
    return rows.take(pc.sort_indices(keys, [(name, "ascending") for name in ORDER]))


def as_written(rows: pa.Table) -> pa.Table:
    """Rows of a sorted table in the order in which they were written; those that lack a position stay as they come."""
    keys = pa.table({name: _plain(rows.column(name)) for name in AS_WRITTEN})
    return rows.take(pc.sort_indices(keys, [(name, "ascending") for name in AS_WRITTEN]))


def _plain(cells: pa.ChunkedArray) -> pa.ChunkedArray:
    return cells.cast(cells.type.value_type) if pa.types.is_dictionary(cells.type) else cells


def _joined(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The same rows in fewer batches: what Arrow needs for a batch of a few rows is more than the rows."""
    few: list[pa.RecordBatch] = []
    for batch in batches:
        few.append(batch)
        if len(few) == JOINED or batch.num_rows > JOINED or batch.nbytes > JOINED_BYTES:
            yield from pa.Table.from_batches(few).combine_chunks().to_batches()
            few = []
    if few:
        yield from pa.Table.from_batches(few).combine_chunks().to_batches()


def _groups(batches: Iterator[pa.RecordBatch], most: int) -> Iterator[list[pa.RecordBatch]]:
    """Batches for one row group each."""
    group: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        group.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= most or size >= ROW_GROUP_BYTES:
            yield group
            group, rows, size = [], 0, 0
    if group:
        yield group


@contextmanager
def new_part(folder: Path, table: Table, part: Part, *, fsync: bool = False) -> Iterator[pq.ParquetWriter]:
    """A part that is in its place when the block ends, and nowhere where an error ends it."""
    aside, file = part.aside(folder, table.name), part.file(folder, table.name)
    file.parent.mkdir(exist_ok=True)
    aside.parent.mkdir(exist_ok=True)
    try:
        with pq.ParquetWriter(aside, table.schema, **_options(table)) as writer:
            yield writer
        if fsync:
            _sync(aside)
        os.replace(aside, file)
    except BaseException:
        with suppress(OSError):
            aside.unlink()
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
    options: dict[str, Any] = {"use_dictionary": labels, "compression": "zstd", "compression_level": 1}
    if table.is_sorted:
        options["sorting_columns"] = [pq.SortingColumn(table.schema.get_field_index(name)) for name in ORDER]
    if table.name == "tensors":
        # Dictionaries and statistics of values cost more than the values: they are for labels only.
        options |= {"compression": "none", "compression_level": None, "write_statistics": ["step", *labels]}
    return options
