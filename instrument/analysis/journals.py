"""Incremental reader of the journals of a run."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import pyarrow as pa

from ..sinks.journal import JournalReader
from ..sinks.journal_truncation_check import truncation_problem
from ..sinks.parts import OTHER_COLUMNS, Part, journals_of
from ..sinks.row_batches import as_table, with_positions
from ..spec.tables import Table

MOST_PIECES = 16  # chunks of one journal before they are concatenated


@dataclass
class _ReadState:
    """The part of a journal that was read so far."""

    stat: os.stat_result
    reading: JournalReader
    pieces: list[pa.Table] = field(default_factory=list)


class Journals:
    """Reads journals and caches their rows. A journal has at most 32 MB, or 64 MB for the tensors table.

    Journals only grow, so only new bytes are read. A journal is read again from the start if the file was replaced,
    became shorter, or was changed without growing.

    Args:
        folder: The folder of the run.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._states: dict[Path, _ReadState] = {}
        self._lock = Lock()

    def __reduce__(self) -> tuple[type[Journals], tuple[Path]]:
        """Pickle and copy the folder only; the copy reads the journals again."""
        return Journals, (self.folder,)

    def read(
        self, table: Table, written: Mapping[tuple[str, Part], int]
    ) -> tuple[dict[Part, list[pa.Table]], dict[Path, str]]:
        """Return the current rows of each journal of a table, and the problems by file.

        Args:
            table: The table.
            written: Minimum number of rows of each journal, as known before the call.
        """
        rows: dict[Part, list[pa.Table]] = {}
        problems: dict[Path, str] = {}
        with self._lock:
            journals = journals_of(self.folder, table.name)
            for (_, part), path in journals.items():
                try:
                    state = self._states[path] = self._refreshed(table, path)
                except FileNotFoundError:
                    continue  # the journal was converted to Parquet in the meantime
                rows[part] = list(state.pieces)
                problem = state.reading.problem or truncation_problem(
                    state.reading.rows, written.get((table.name, part), 0)
                )
                if problem is not None:
                    problems[path] = problem
            for path in [path for path in self._states if path.name.startswith(f"{table.name}-")]:
                if path not in journals.values():
                    del self._states[path]
        return rows, problems

    def _refreshed(self, table: Table, path: Path) -> _ReadState:
        stat, old_state = path.stat(), self._states.get(path)
        if old_state is not None and _same(old_state.stat, stat):
            return old_state
        grew = old_state is not None and _grew(old_state.stat, stat) and old_state.reading.problem is None
        state = old_state if grew and old_state is not None else _ReadState(stat, JournalReader(path))
        reading = JournalReader.of(path, after=state.reading)
        if reading.schema is not None and reading.schema != table.plain_schema:
            reading.problem = OTHER_COLUMNS
            return _ReadState(stat, reading)
        pieces = [*state.pieces, *rows_of(table, reading)]
        if len(pieces) > MOST_PIECES:
            pieces = [pa.concat_tables(pieces).unify_dictionaries().combine_chunks()]
        return _ReadState(stat, reading, pieces)


def rows_of(table: Table, reading: JournalReader) -> list[pa.Table]:
    """Return the rows of a reading as one chunk, or no chunk; the duration of a scan depends on the number of chunks."""
    batches = [with_positions(table, batch) for batch in reading.batches()]
    return [as_table(table, pa.Table.from_batches(batches).combine_chunks())] if batches else []


def _same(one: os.stat_result, other: os.stat_result) -> bool:
    return _file(one) == _file(other) and (one.st_size, one.st_mtime_ns) == (other.st_size, other.st_mtime_ns)


def _grew(one: os.stat_result, other: os.stat_result) -> bool:
    return _file(one) == _file(other) and one.st_size < other.st_size


def _file(stat: os.stat_result) -> tuple[int, int]:
    return stat.st_dev, stat.st_ino
