"""Incremental reader of a table of a run in progress: each row is read once."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from ..errors import first_line
from ..storage.checksums import REMEDY, arrow_files
from ..storage.journal import JournalReader
from ..storage.parts import Part, as_written, journals_of, part_files, read_journal
from ..storage.remote_folder import arrow_name, is_address
from ..storage.row_batches import as_table
from ..storage.run_files import UNREADABLE
from ..tables.schemas import AS_WRITTEN, TABLES

READERS = 16  # threads that read the footers of files; remote storage has a high latency
FileVersion = tuple[int, int] | None
"""Modification time and size of a local file."""


class RowsRemovedError(Exception):
    """Rows that were read do not exist any more, for example because the run was resumed from a checkpoint."""


@dataclass(frozen=True)
class _RowGroup:
    """Rows of a Parquet file to be read, without the first ones in the order of writing, which were read from the journal."""

    part: Part
    file: Path
    index: int
    skipped: int


class NewRows:
    """Reads the rows of a table that were added since the previous call.

    A row is in a journal first and in a Parquet file later. Rows are identified by their index in the order of writing,
    which a conversion does not change, so each row is returned once. Memory does not grow with the number of rows. A remote folder has no
    journals: rows appear with each uploaded file. `moved`: whether files disappear after they were uploaded, instead of being removed by a
    resumed run.
    """

    def __init__(self, folder: Path, table: str, columns: Sequence[str], *, moved: bool = False) -> None:
        self.folder = folder
        self.table = TABLES[table]
        self.columns = list(columns)
        self.moved = moved
        self.problems: list[str] = []
        self._arrow = arrow_files(folder)
        self._is_remote = is_address(folder)
        self._journals: dict[Part, JournalReader] = {}
        self._parts: dict[Part, FileVersion] = {}  # parts that were read, or whose row groups are in `_left`
        self._left: list[_RowGroup] = []  # read from the end
        self._total = 0

    @property
    def fraction_read(self) -> float:
        """The fraction of the row groups of all files that has been read."""
        return 1 - len(self._left) / self._total if self._total else 1.0

    def read(self, until: float) -> Iterator[pa.Table]:
        """Yield the rows that were not returned before.

        New rows of journals come first. Then come the row groups of files: those of new files before the rest of the
        older ones, which are read in an order that covers all steps evenly, beginning with the last.

        Args:
            until: Time of `time.monotonic` after which no further row group is read; the rest follows in later calls.
                At least one row group is read.

        Raises:
            RowsRemovedError: Rows that were returned earlier were removed. Read the table with a new object.
        """
        # Journals are listed first: one that is converted meanwhile is then found as a Parquet file.
        journals = {} if self._is_remote else journals_of(self.folder, self.table.name)
        listed = {part: path for (_, part), path in journals.items()}
        for part, path in listed.items():
            if part not in self._parts:
                yield from self._journal_rows(part, path)
        self._add_files(part_files(self.folder, self.table.name), listed)
        while self._left:
            rows = self._row_group(self._left[-1])
            self._left.pop()
            if rows is not None:
                yield rows
            if time.monotonic() >= until:
                break

    def _journal_rows(self, part: Part, path: Path) -> Iterator[pa.Table]:
        before = self._journals.get(part)
        if before is not None and before.problem is not None:
            return
        try:
            size = path.stat().st_size
            if before is not None and size == before.end:
                return
            if before is not None and size < before.end:
                raise RowsRemovedError(path)
            reading = read_journal(self.table, path, after=before)
        except FileNotFoundError:  # converted to Parquet in the meantime
            return
        yield as_table(self.table, [*reading.batches()]).select(self.columns)
        if reading.problem is not None:
            self._problem(path, reading.problem)
        if reading.schema is not None:
            self._journals[part] = reading.without_content()

    def _add_files(self, files: Mapping[Part, Path], journals: Mapping[Part, Path]) -> None:
        versions = {part: self._version(file) for part, file in files.items()}
        if any(version != versions.get(part, version) for part, version in self._parts.items()):
            raise RowsRemovedError(self.folder)  # a resumed run wrote another file with the same name
        for part in [part for part in files if part not in self._parts]:
            covered = {known for known in (*self._parts, *self._journals) if known != part and part.covers(known)}
            if covered and (
                not covered <= self._parts.keys()
                or any(group.part in covered for group in self._left)
                or sum(known.end - known.number for known in covered) < part.end - part.number
            ):
                raise RowsRemovedError(files[part])  # merged from files of which not all were read
            if covered:
                self._parts = {known: version for known, version in self._parts.items() if known not in covered}
                self._parts[part] = versions[part]
        new = {part: file for part, file in files.items() if part not in self._parts}
        gone = [part for part in self._parts if part not in files]
        gone += [part for part in self._journals if part not in journals and part not in files]
        if gone and not self.moved:
            raise RowsRemovedError(self.folder)
        for part in gone:
            self._parts.pop(part, None)
        with ThreadPoolExecutor(READERS) as readers:
            counts = dict(zip(new, readers.map(self._row_counts, new.values()), strict=True))
        groups = [group for part, file in new.items() for group in self._groups(part, file, counts[part])]
        self._left += [groups[i] for i in evenly_covering(len(groups))]
        self._total += len(groups)
        self._parts.update({part: versions[part] for part in new})
        for part in [part for part in self._journals if part in self._parts]:
            del self._journals[part]

    def _groups(self, part: Part, file: Path, counts: Sequence[int]) -> Iterator[_RowGroup]:
        """Yield the row groups of a file, without those that were read from its journal."""
        skipped = self._journals[part].rows if part in self._journals else 0
        for index, rows in enumerate(counts):
            if skipped < rows:
                yield _RowGroup(part, file, index, skipped)
            skipped = max(0, skipped - rows)

    def _version(self, file: Path) -> FileVersion:
        """Return what differs between two files with the same name; None for remote files, which would be slow."""
        if self._is_remote:
            return None
        try:
            about = file.stat()
        except FileNotFoundError:
            raise RowsRemovedError(file) from None
        return about.st_mtime_ns, about.st_size

    def _row_counts(self, file: Path) -> list[int]:
        try:
            footer = pq.read_metadata(arrow_name(file), filesystem=self._arrow)
        except FileNotFoundError:
            raise RowsRemovedError(file) from None
        except UNREADABLE as error:
            self._problem(file, f"cannot be read: {first_line(error)}; {REMEDY}")
            return []
        return [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]

    def _row_group(self, group: _RowGroup) -> pa.Table | None:
        wanted = list(dict.fromkeys([*self.columns, *(AS_WRITTEN if self.table.is_sorted and group.skipped else ())]))
        names = arrow_name(group.file)
        try:
            fragment = ds.ParquetFileFormat().make_fragment(names, filesystem=self._arrow, row_groups=[group.index])
            rows = fragment.to_table(schema=self.table.schema, columns=wanted, use_threads=False)
        except FileNotFoundError:
            raise RowsRemovedError(group.file) from None
        except UNREADABLE as error:
            self._problem(group.file, f"cannot be read: {first_line(error)}; {REMEDY}")
            return None
        if group.skipped:
            rows = (as_written(rows) if self.table.is_sorted else rows).slice(group.skipped)
        return rows.select(self.columns)

    def _problem(self, file: Path, problem: str) -> None:
        with suppress(ValueError):
            file = file.relative_to(self.folder)
        if (message := f"{file}: {problem}") not in self.problems:
            self.problems.append(message)


def evenly_covering(count: int) -> list[int]:
    """Return the indices of `count` items so that the last k of the result are evenly spaced, for any k.

    The last index of the result is the last item.
    """
    bits = max(1, (count - 1).bit_length())
    return sorted(range(count), key=lambda i: int(f"{count - 1 - i:0{bits}b}"[::-1], 2), reverse=True)
