"""Writer of one table: a journal, which becomes a Parquet part when it is large enough."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from ..tables.message_template import Message
from ..tables.schemas import Table
from ..values.dtensor import own_rank
from .journal import Journal
from .parts import Part, convert_journal, new_part


class TableWriter:
    """Writes batches of plain rows.

    Args:
        journal_bytes: The size at which a journal becomes a part, in bytes.
        first: The number of the first part.
        fsync: Whether rows survive a power failure.

    Raises:
        OSError: From every method: a file cannot be written.
    """

    def __init__(self, folder: Path, table: Table, *, journal_bytes: int, first: int = 0, fsync: bool = False) -> None:
        self.folder = folder
        self.table = table
        self.journal_bytes = journal_bytes
        self.fsync = fsync
        self.part = Part(own_rank(), first)
        self.journal: Journal | None = None
        self.rows = 0  # in the journal

    def append(self, batch: pa.RecordBatch | Message) -> None:
        """Add rows to the journal. A journal that is large enough becomes a part first."""
        if self.journal is not None and self.journal.size >= self.journal_bytes:
            self.finish_part()
        if self.journal is None:
            path = self.part.journal(self.folder, self.table.name)
            path.parent.mkdir(exist_ok=True)
            self.journal = Journal(path, batch.schema, fsync=self.fsync)
        self.journal.append(batch)
        self.rows = self.journal.rows

    def finish_part(self) -> None:
        """Convert the journal, if there is one, to a part."""
        if self.journal is not None:
            convert_journal(self.folder, self.table, self.part, self.rows, fsync=self.fsync)
            self.release()
            self.part = self.part._replace(number=self.part.number + 1)
            # Arrow would keep the memory of the conversion, up to 50 MB, until its next large allocations.
            pa.default_memory_pool().release_unused()

    @contextmanager
    def new_part(self) -> Iterator[pq.ParquetWriter]:
        """Write a part directly, without a journal. For so many rows that writing them twice is too slow."""
        self.finish_part()
        with new_part(self.folder, self.table, self.part, fsync=self.fsync) as writer:
            yield writer
        self.part = self.part._replace(number=self.part.number + 1)

    def close(self) -> None:
        """Convert the journal to a part. A table without rows gets an empty part, so that it can be read."""
        self.finish_part()
        if not self.part.number:
            with self.new_part():
                pass

    def release(self) -> None:
        """Close the journal and keep its file."""
        if self.journal is not None:
            self.journal.close()
            self.journal, self.rows = None, 0
