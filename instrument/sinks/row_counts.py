"""How many rows each journal of a run holds, in a file beside them: a journal that was cut short afterwards is noticed by it.

    journal/rows.0000    of rank 0: for each table the number of the part that its journal will be, and the rows in it

It is written over when a step's rows are in their journals. So a process that is killed leaves at least as many rows in each
journal as it says, and a reader that looks into it before it looks into a journal finds no fewer.
"""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Iterable
from itertools import chain
from pathlib import Path

from ..capture.tables import TABLES

DAMAGED = "it is damaged: whether a journal was cut short is not known"
LOOKS = 3  # at a file that is just being written
NAME = re.compile(r"rows\.(\d{4})")
PAIRS = struct.Struct(f"<{2 * len(TABLES)}q")  # followed by a checksum
CHECKSUM = struct.Struct("<I")


class RowCounts:
    """The file of one process, while it writes.

    Args:
        path: The file; one that is there is written over.

    Raises:
        OSError: From all methods: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None

    def write(self, counts: Iterable[tuple[int, int]]) -> None:
        """Write down what the journals hold.

        Args:
            counts: For each table, in their order, the number of the part that its journal will be, and the rows in it.
        """
        if self._file is None:
            self.path.parent.mkdir(exist_ok=True)
            self._file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        pairs = PAIRS.pack(*chain.from_iterable(counts))
        os.pwrite(self._file, pairs + CHECKSUM.pack(zlib.crc32(pairs)), 0)

    def remove(self) -> None:
        """There are no journals any more."""
        self.release()
        self.path.unlink(missing_ok=True)

    def release(self) -> None:
        """Let go of the file, which stays where it is."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def counts_in(path: Path) -> dict[tuple[str, int], int] | None:
    """The rows in each journal of a process, by table and number of the part; None where the file is damaged."""
    for _ in range(LOOKS):
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return {}
        pairs, checksum = content[: PAIRS.size], content[PAIRS.size :]
        if len(pairs) == PAIRS.size and checksum == CHECKSUM.pack(zlib.crc32(pairs)):
            numbers = PAIRS.unpack(pairs)
            found = zip(TABLES, numbers[::2], numbers[1::2], strict=True)
            return {(table, part): rows for table, part, rows in found if rows}
    return None


def cut_short(rows: int, written: int) -> str | None:
    """What is wrong with a journal of which so many rows can be read, and so many were written; None where nothing is."""
    return None if rows >= written else f"it was cut short: {rows:,} of {written:,} rows are there"
