"""The number of rows in each journal of a run, stored in a file next to the journals, to detect truncated journals.

    journal/rows.0000    of rank 0: for each table the number of its next part, and the number of rows in its journal

The file is overwritten after the rows of a step are in their journals. So the journals of a killed process contain at
least as many rows as the file says, and a reader that reads this file before the journals finds no fewer.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

from ..tables.schemas import TABLES

DAMAGED = "the file is damaged: truncated journals cannot be detected"
ATTEMPTS = 3  # the number of attempts to read a file that is being written
PAIR = struct.Struct("<2q")  # one per table, followed by a checksum
CHECKSUM = struct.Struct("<I")
_AT = {table: index * PAIR.size for index, table in enumerate(TABLES)}


class RowCounts:
    """The row count file of one process. An existing one is overwritten. All methods raise an OSError if it cannot be written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._content = bytearray(PAIR.size * len(TABLES) + CHECKSUM.size)
        self._pairs = memoryview(self._content)[: -CHECKSUM.size]

    def write(self, counts: Iterable[tuple[str, int, int]]) -> None:
        """Write for some tables the number of the next part and the number of rows in the journal. Those of the others are unchanged."""
        if self._file is None:
            self.path.parent.mkdir(exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        for table, part, rows in counts:
            PAIR.pack_into(self._pairs, _AT[table], part, rows)
        CHECKSUM.pack_into(self._content, len(self._pairs), zlib.crc32(self._pairs))
        os.pwrite(self._file, self._content, 0)

    def remove(self) -> None:
        """Remove the file, since no journals are left."""
        self.release()
        self.path.unlink(missing_ok=True)

    def release(self) -> None:
        """Close the file and keep it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def read_counts(path: Path) -> dict[tuple[str, int], int] | None:
    """Return the number of rows in each journal of a process, by table and part number; None if the file is damaged."""
    for _ in range(ATTEMPTS):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return {}
        pairs, checksum = content[: -CHECKSUM.size], content[-CHECKSUM.size :]
        if pairs and len(pairs) % PAIR.size == 0 and checksum == CHECKSUM.pack(zlib.crc32(pairs)):
            # An earlier version wrote fewer tables: the first ones.
            numbered = ((table, *pair) for table, pair in zip(TABLES, PAIR.iter_unpack(pairs), strict=False))
            return {(table, part): rows for table, part, rows in numbered if rows}
    return None


def truncation_problem(rows: int, written: int) -> str | None:
    """Return a message if a journal contains fewer rows than were written; None otherwise."""
    return None if rows >= written else f"the journal is truncated: it contains {rows:,} of {written:,} rows"
