"""The files of a run: Parquet parts, one folder a table, and the journals of what is in no part yet.

    stats/part-0000-000000.parquet        rank, number
    journal/stats-0000-000001.arrows      the rows that will be part 1
    journal/stats-0000-000001.tmp         part 1 while it is written

A part is written aside and put into its place by renaming; only then is the journal of its rows removed. So whoever looks
for journals first, and for parts then, meets every row, and where both are there the part counts.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from ..capture.tables import TABLES, Table, as_table
from .journal import SUFFIX, Reading

JOURNALS = "journal"
RESERVE = "reserve"  # room on the disk, see instrument.sinks.parquet
DAMAGED = ".damaged"
ROW_GROUP_ROWS = 8_192
JOINED, JOINED_BYTES = 64, 2**20  # batches, and bytes of the last of them, that are joined to one
ROW_GROUP_BYTES = 16 * 2**20  # of recorded values

_PART = re.compile(r"part-(\d{4})-(\d{6,})\.parquet")
_JOURNAL = re.compile(rf"([a-z]+)-(\d{{4}})-(\d{{6,}})\{SUFFIX}")


class Part(NamedTuple):
    """One part of a table: which process wrote it, and which in order."""

    rank: int
    number: int

    def file(self, folder: Path, table: str) -> Path:
        """Its Parquet file."""
        return folder / table / f"part-{self.rank:04d}-{self.number:06d}.parquet"

    def journal(self, folder: Path, table: str) -> Path:
        """The journal of its rows, as long as there is no file."""
        return folder / JOURNALS / f"{table}-{self.rank:04d}-{self.number:06d}{SUFFIX}"

    def aside(self, folder: Path, table: str) -> Path:
        """Its file while it is written."""
        return self.journal(folder, table).with_suffix(".tmp")


def parts_of(folder: Path, table: str) -> dict[Part, Path]:
    """The Parquet files of a table, in order."""
    found = {}
    for file in sorted((folder / table).glob("*.parquet")):
        if match := _PART.fullmatch(file.name):
            found[Part(int(match[1]), int(match[2]))] = file
    return dict(sorted(found.items()))


def journals_of(folder: Path, table: str | None = None) -> dict[tuple[str, Part], Path]:
    """The journals of a table, or of all tables, in order; some may be of rows that are in a part already."""
    found = {}
    for file in (folder / JOURNALS).glob(f"*{SUFFIX}"):
        match = _JOURNAL.fullmatch(file.name)
        if match and match[1] in TABLES and table in (None, match[1]):
            found[match[1], Part(int(match[2]), int(match[3]))] = file
    return dict(sorted(found.items()))


def foreign_files(folder: Path) -> list[Path]:
    """Files among the tables and journals that no run has put there, and that nothing here reads."""
    known = {path for table in TABLES for path in parts_of(folder, table).values()}
    known |= {*journals_of(folder).values(), folder / JOURNALS / RESERVE}
    places = [folder / place for place in (*TABLES, JOURNALS)]
    found = [file for place in places if place.is_dir() for file in place.rglob("*") if not file.is_dir()]
    return sorted(file for file in found if file not in known and file.suffix != ".tmp")


def settle(folder: Path, table: Table, part: Part, *, fsync: bool = False) -> Reading:
    """Make a part of its journal, and remove the journal; one that is damaged is kept under another name.

    Returns:
        What was found in the journal, with what could not be read of it.

    Raises:
        OSError: The part cannot be written; the journal is left as it is.
    """
    journal = part.journal(folder, table.name)
    reading = Reading.of(journal, ours=True)
    if not part.file(folder, table.name).exists():
        usable = reading.batches() if reading.schema == table.plain_schema else iter(())
        with new_part(folder, table, part, fsync=fsync) as writer:
            for group in _groups(_joined(usable)):
                writer.write_table(as_table(table, group))
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
    for name in TABLES:
        for part, file in parts_of(folder, name).items():
            if part.rank == rank and part.number >= counts[name]:
                file.unlink()
    for (_, part), file in journals_of(folder).items():
        if part.rank == rank:
            file.unlink()
    for aside in (folder / JOURNALS).glob("*.tmp"):
        aside.unlink()


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


def _groups(batches: Iterator[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Batches for one row group each."""
    group: list[pa.RecordBatch] = []
    rows = size = 0
    for batch in batches:
        group.append(batch)
        rows, size = rows + batch.num_rows, size + batch.nbytes
        if rows >= ROW_GROUP_ROWS or size >= ROW_GROUP_BYTES:
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
    if table.name == "tensors":
        # Dictionaries and statistics of values cost more than the values: they are for labels only.
        options |= {"compression": "none", "compression_level": None, "write_statistics": ["step", *labels]}
    return options
