"""One table while it is written: a journal, and parts that take its place when it has grown."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ..capture.ranks import own_rank
from ..capture.tables import Table
from .journal import Journal
from .parts import Part, new_part, parts_of, settle


class TableLog:
    """Takes batches of plain rows.

    Args:
        folder: The run's folder.
        table: Which table.
        journal_bytes: How large a journal may grow before a part takes its place.
        first: The number of the first part.
        fsync: Whether rows are to outlive a power failure.

    Raises:
        OSError: From every method: it cannot be written.
    """

    def __init__(self, folder: Path, table: Table, *, journal_bytes: int, first: int = 0, fsync: bool = False) -> None:
        self.folder = folder
        self.table = table
        self.journal_bytes = journal_bytes
        self.fsync = fsync
        self.part = Part(own_rank(), first)
        self.journal: Journal | None = None

    def is_there(self, *, parts: bool) -> bool:
        """Whether what was written is still in its place, as far as names and sizes show.

        Args:
            parts: Whether parts have to be there too; where they are moved elsewhere they have not.

        Raises:
            OSError: The folder cannot be looked into.
        """
        if self.journal is not None and not self.journal.is_there():
            return False
        there = list(parts_of(self.folder, self.table.name)) if parts else []
        own = [part for part in there if part.rank == self.part.rank]
        return not parts or sum(part.end - part.number for part in own) >= self.part.number

    @property
    def rows(self) -> int:
        """How many rows there are in the journal."""
        return 0 if self.journal is None else self.journal.rows

    def append(self, batch: pa.RecordBatch) -> None:
        """Add rows to the journal; a large one becomes a part first."""
        if self.journal is not None and self.journal.size >= self.journal_bytes:
            self.settle()
        if self.journal is None:
            path = self.part.journal(self.folder, self.table.name)
            path.parent.mkdir(exist_ok=True)
            self.journal = Journal(path, self.table.plain_schema, fsync=self.fsync)
        self.journal.append(batch)

    def settle(self) -> None:
        """Make a part of the journal, where there is one."""
        if self.journal is not None:
            settle(self.folder, self.table, self.part, self.rows, fsync=self.fsync)
            self.release()
            self.part = self.part._replace(number=self.part.number + 1)

    @contextmanager
    def new_part(self) -> Iterator[pq.ParquetWriter]:
        """A part without a journal, for more rows than are worth writing twice."""
        self.settle()
        with new_part(self.folder, self.table, self.part, fsync=self.fsync) as writer:
            yield writer
        self.part = self.part._replace(number=self.part.number + 1)

    def close(self) -> None:
        """Make a part of what is left; a table that never had a row gets an empty one, so that it can be read."""
        self.settle()
        if not self.part.number:
            with self.new_part():
                pass

    def release(self) -> None:
        """Let go of the journal, which stays where it is."""
        if self.journal is not None:
            self.journal.close()
            self.journal = None
