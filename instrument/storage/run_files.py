"""Access to the files of a run's folder in any state: in progress, done, killed or damaged."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import groupby, islice, pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from ..errors import InstrumentWarning, first_line
from ..fields.pip_extras import DISTRIBUTION, installed_version
from ..tables.schemas import AS_WRITTEN, CUSTOM, POSITION, SHAPE, TABLES, Table
from ..tables.statistics import DEFAULT, STATISTICS
from .blocks import BlockReader, Bytes, Place, binary_of, read_in_threads
from .checksums import REMEDY, arrow_files, remote_errors
from .journal_truncation_check import DAMAGED, truncation_problem
from .lock import is_locked
from .parts import (
    JOURNALS,
    ROW_GROUP_BYTES,
    Part,
    as_written,
    block_files,
    foreign_files,
    journals_of,
    lost_journals,
    part_files,
    read_journal,
    rows_written,
)
from .remote_folder import arrow_name, is_address, moved_to
from .row_batches import as_table
from .run_record import remove_wrong_types

OPTIONAL_COLUMNS = {
    POSITION.name,
    *("mesh", "placement", "scope"),
    SHAPE.name,
    CUSTOM.name,
    *("location", "value", "threshold"),  # of events
    "settings",  # of layers
    "held",  # of effects
    "projection",  # of operators
    *Place._fields,  # of tensors
    *(name for name in STATISTICS if name not in DEFAULT),
}
"""Columns that may be missing in files of earlier versions; they are read as null."""
# Bytes up to which the values of several tensors are copied together, since each chunk of a column takes time.
SMALL_TENSOR = 2**16
OPEN_AHEAD = 256  # files opened in advance, so that they stay readable if they are merged and deleted
UNREADABLE = (pa.ArrowException, OSError)
T = TypeVar("T")
_ONE_AT_A_TIME: dict[str, Any] = {
    "batch_readahead": 0,
    "fragment_readahead": 0,
    "use_threads": False,
    "fragment_scan_options": ds.ParquetFragmentScanOptions(pre_buffer=False),
}


class RunFiles:
    """The files of one run. Damaged files are added to `problems` and skipped.

    Attributes:
        problems: Descriptions of the problems, each beginning with the name of the file.
        blocks: Reads the data of tensors in block files.

    Raises:
        InstrumentError: Raised by the methods if a remote folder cannot be reached.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []
        self._arrow = arrow_files(folder)
        self.blocks = BlockReader(folder)
        self._is_remote = is_address(folder)
        self._checked_folders: set[str] = set()  # folders that were checked for foreign files
        self._damaged_files: set[Path] = set()
        self._valid_files: set[Path] = set()

    def info(self) -> dict[str, Any]:
        """Return the content of run.json as far as it can be read, with the status `killed` if its process on this machine is gone."""
        path = self.folder / "run.json"
        try:
            with remote_errors(path) if self._is_remote else nullcontext():
                content = path.read_bytes()
            info = json.loads(content)
        except (OSError, ValueError) as error:
            self._problem(path, f"cannot be read: {error}")
            info = None
        if not isinstance(info, dict):
            info = {}
        for problem in remove_wrong_types(info):
            self._problem(path, f"{problem}: skipped")
        info = {"seed": None, **info, "status": info.get("status") or "unknown"}
        for name in ("overrides", "metrics"):
            info[name] = info.get(name) or {}
        if not self._is_remote and (address := moved_to(info)) is not None:
            what = "files were moved to" if info.get("shared_folder", True) else "files of other machines are in"
            self._problem(path, f"{what} {address}: load this address to read all rows")
        if info["status"] == "running" and not self._is_remote and not is_locked(self.folder, info.get("rank", 0)):
            info["status"] = "killed"
        return info

    def table_files(self, name: str) -> tuple[list[Path], list[pa.Table]]:
        """Return the Parquet files of a table that are not known to be damaged, and the rows of its journals."""
        for subfolder in {name, JOURNALS} - self._checked_folders if not self._is_remote else ():
            self._checked_folders.add(subfolder)
            for file in foreign_files(self.folder, subfolder):
                self._problem(file, "not a file of a run: skipped")
        # Journals are read first: one that is converted meanwhile is then found as a Parquet file.
        journals = self._unwritten(name)
        # Once more: the run may have written them before it ended.
        if not journals and self._lacks_parts(name) and self._has_ended() and self._lacks_parts(name):
            self._problem(self.folder / name, "files of this table are missing")
        parts = self._parts(name)
        return list(parts.values()), [
            rows for part, rows in journals.items() if not any(later.covers(part) for later in parts)
        ]

    def _parts(self, name: str) -> dict[Part, Path]:
        return {part: file for part, file in part_files(self.folder, name).items() if file not in self._damaged_files}

    def _lacks_parts(self, name: str) -> bool:
        """Return whether parts are missing: a run that ended has parts 0, 1, 2, ... of each table, also of those without rows."""
        ends: dict[int, int] = {}
        for part in (present := part_files(self.folder, name)):
            if part.number > ends.get(part.rank, 0):
                return True
            ends[part.rank] = part.end
        return not present

    def _has_ended(self) -> bool:
        """Return whether the run has files of all tables in this folder; those of other versions, and after a full disk, lack tables."""
        info = self.info()
        is_complete = info["status"] in ("done", "stopped") and not (info.get("recording_stopped") or moved_to(info))
        return is_complete and (info.get("versions") or {}).get("instrument") == installed_version(DISTRIBUTION)

    def _unwritten(self, name: str) -> dict[Part, pa.Table]:
        """Return the rows of the journals of a table; empty for a remote run, since journals are not uploaded."""
        rows: dict[Part, pa.Table] = {}
        if self._is_remote:
            return rows
        written, damaged = rows_written(self.folder)
        problems: dict[Path, str | None] = {}
        for (_, part), path in journals_of(self.folder, name).items():
            with suppress(FileNotFoundError):  # the journal was converted to Parquet in the meantime
                reading = read_journal(TABLES[name], path)
                # The duration of a scan depends on the number of chunks.
                rows[part] = as_table(TABLES[name], [*reading.batches()]).combine_chunks()
                problems[path] = reading.problem or truncation_problem(reading.rows, written.get((name, part), 0))
        problems |= dict.fromkeys(damaged, DAMAGED) | lost_journals(self.folder, name)
        for path, problem in problems.items():
            if problem is not None:
                self._problem(path, problem)
        return rows

    def check_footers(self, name: str) -> None:
        """Read the footers of all Parquet files of a table; damaged and incompatible files are no longer listed.

        Raise a FileNotFoundError if a file was deleted in the meantime.
        """
        for file in [file for file in self._parts(name).values() if file not in self._valid_files]:
            with self.errors_reported(file, skip=True):
                columns = {*self._columns_of(file), *OPTIONAL_COLUMNS}
                if missing := [column for column in TABLES[name].schema.names if column not in columns]:
                    self._damaged_files.add(file)
                    self._problem(file, f"column {', '.join(missing)} is missing: file skipped")
                else:
                    self._valid_files.add(file)

    def lacks_columns(self, file: Path, name: str) -> bool:
        """Return whether a file was written by an earlier version, without some of the current columns; False if it is unreadable."""
        try:
            return not OPTIONAL_COLUMNS.intersection(TABLES[name].schema.names) <= set(self._columns_of(file))
        except UNREADABLE:
            return False

    def check_contents(self, name: str) -> None:
        """Read all Parquet files of a table completely, as `check_footers`; files with damaged contents are no longer listed."""
        for file in self._parts(name).values():
            with self.errors_reported(file, skip=True):
                for _ in self._opened(file).to_batches():
                    pass

    def read(self, name: str, columns: Sequence[str] | None = None, condition: ds.Expression | None = None) -> pa.Table:
        """Read the rows of a table in the order in which they were written."""
        return self.retry_if_merged(
            lambda: self._read(TABLES[name], columns or TABLES[name].schema.names, condition), name
        )

    def scan(
        self, name: str, columns: Sequence[str], condition: ds.Expression | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Read the rows of a table in batches, for tables that are larger than memory.

        Rows of a step are in the order in which they were written, but steps of more than about 100,000 rows may be
        ordered by layer.
        """
        table = TABLES[name]
        wanted = _with_keys(table, columns)
        for file, piece in self.fragments(table):
            with self.errors_reported(file):
                # A row group of recorded tensors has 16 MB. Arrow would read several of them ahead.
                is_large = name == "tensors"
                options = _ONE_AT_A_TIME if is_large else {}
                for part in row_groups(piece) if is_large else [piece]:
                    # Arrow copies the values of the rows that a filter selects, also if it selects all of them.
                    rest = condition
                    if is_large and condition is not None:  # only the columns of the condition are read
                        chosen = part.count_rows(filter=condition, use_threads=False)
                        rest = None if chosen == part.count_rows() else condition
                    for batch in part.to_batches(schema=table.schema, columns=wanted, filter=rest, **options):
                        for rows in _pieces(batch) if "data" in wanted else [batch]:
                            yield from self._finished(table, pa.Table.from_batches([rows]), columns).to_batches()

    def retry_if_merged(self, operation: Callable[[], T], name: str) -> T:
        """Call `operation` and return its result; repeat the call if a file was merged into another one in the meantime."""
        while True:
            before = part_files(self.folder, name)
            try:
                return operation()
            except FileNotFoundError:
                if part_files(self.folder, name) == before:
                    raise

    def count(self, name: str) -> int:
        """Return the number of rows of a table without reading the rows."""
        count = 0
        for file, piece in self.fragments(TABLES[name]):
            with self.errors_reported(file):
                count += piece.count_rows()
        return count

    def report_skipped(self, what: str) -> None:
        """Add recorded tensors that a reader cannot handle to the problems."""
        self._problem(self.folder / "tensors", f"{what}: skipped")

    def _read(self, table: Table, columns: Sequence[str], condition: ds.Expression | None) -> pa.Table:
        self.check_footers(table.name)
        files, journals = self.table_files(table.name)
        wanted, names = _with_keys(table, columns), [arrow_name(file) for file in files]
        try:  # several files at once; columns that a file lacks are null
            parts = ds.dataset(names, schema=table.schema, format="parquet", filesystem=self._arrow)
            read = [parts.to_table(columns=wanted, filter=condition)]
        except FileNotFoundError:  # it was merged; see `retry_if_merged`
            raise
        except UNREADABLE:  # read the files one by one, and skip those with damaged contents
            read = [table.schema.empty_table().select(wanted)]
            for file, piece in self.fragments(table):
                with self.errors_reported(file):
                    read.append(piece.to_table(schema=table.schema, columns=wanted, filter=condition))
        else:
            read += [ds.dataset(rows).to_table(columns=wanted, filter=condition) for rows in journals]
        return self._finished(table, pa.concat_tables(read), columns)

    def _finished(self, table: Table, rows: pa.Table, columns: Sequence[str]) -> pa.Table:
        """Return the requested columns in the order in which the rows were written, with the data in block files."""
        if table.name == "tensors" and "data" in columns and rows["block"].null_count < len(rows):
            rows = self._with_data(rows)
        return (as_written(rows) if table.is_sorted else rows).select(list(columns))

    def _with_data(self, rows: pa.Table) -> pa.Table:
        """Return rows of tensors with the data in block files, as views of mapped memory. Unreadable ones are left out."""
        cells: list[Bytes | bytes | None] = []
        is_readable = []

        def read(rank: int, *cells: Any) -> Bytes | OSError | None:
            place = Place(*cells)
            try:
                return None if place.block is None else self.blocks.read(rank, place)
            except OSError as error:
                return error

        columns = [rows[name].to_pylist() for name in ("rank", *Place._fields)]
        for index, content in enumerate(read_in_threads(read, [*zip(*columns, strict=True)])):
            is_readable.append(not isinstance(content, OSError))
            if content is None:
                cells.append(rows["data"][index].as_py())
            elif isinstance(content, OSError):
                file = Part(columns[0][index], columns[1][index]).block(self.folder)
                self._problem(file, f"cannot be read: {first_line(content)}; {REMEDY}")
                cells.append(None)
            else:
                content.flags.writeable = False
                cells.append(content.tobytes() if content.nbytes <= SMALL_TENSOR else content)
        chunks: list[pa.Array] = []
        for is_large, group in groupby(cells, key=lambda cell: isinstance(cell, np.ndarray)):
            contents: list[Any] = [*group]
            chunks += map(binary_of, contents) if is_large else [pa.array(contents, pa.large_binary())]
        rows = rows.set_column(rows.schema.get_field_index("data"), "data", pa.chunked_array(chunks))
        return rows if all(is_readable) else rows.filter(pa.array(is_readable))

    def fragments(self, table: Table) -> Iterator[tuple[Path, ds.Fragment]]:
        """Yield the files of a table; the first files are opened before any is read."""

        def operation() -> tuple[list[tuple[Path, ds.Fragment]], list[Path], list[pa.Table]]:
            self.check_footers(table.name)
            files, journals = self.table_files(table.name)
            return [(file, self._opened(file)) for file in files[:OPEN_AHEAD]], files, journals

        opened, files, journals = self.retry_if_merged(operation, table.name)
        yield from opened
        yield from ((file, self._opened(file)) for file in islice(files, OPEN_AHEAD, None))
        for rows in journals:
            yield from ((self.folder / JOURNALS, piece) for piece in ds.dataset(rows).get_fragments())

    def _opened(self, file: Path) -> ds.Fragment:
        return ds.ParquetFileFormat().make_fragment(self._arrow.open_input_file(arrow_name(file)))

    def _columns_of(self, file: Path) -> list[str]:
        names: list[str] = pq.read_schema(arrow_name(file), filesystem=self._arrow).names
        return names

    @contextmanager
    def errors_reported(self, file: Path, *, skip: bool = False) -> Iterator[None]:
        """Add an error to the problems. With `skip`, the file is no longer listed, and the error of a deleted file is raised."""
        try:
            yield
        except UNREADABLE as error:
            if skip and isinstance(error, FileNotFoundError):
                raise
            if skip:
                self._damaged_files.add(file)
            self._problem(file, f"cannot be read: {first_line(error)}; {REMEDY}")

    def _problem(self, file: Path, problem: str) -> None:
        message = f"{file.relative_to(self.folder)}: {problem}"
        if message not in self.problems:
            self.problems.append(message)
            warnings.warn(f"{self.folder}: {message}", InstrumentWarning, stacklevel=2)


def row_groups(piece: ds.Fragment) -> Sequence[ds.Fragment]:
    """Return the row groups of a Parquet file; other fragments are returned unchanged."""
    return piece.split_by_row_group() if isinstance(piece, ds.ParquetFileFragment) else [piece]


def _pieces(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split rows of tensors, so that the bytes of a piece in block files have about the size of a row group."""
    pieces = np.cumsum(rows["size"].fill_null(0).to_numpy()) // ROW_GROUP_BYTES
    for start, end in pairwise([0, *(np.flatnonzero(np.diff(pieces)) + 1).tolist(), len(pieces)]):
        yield rows.slice(start, end - start)


def size_on_disk(folder: Path) -> int:
    """Return the size of the tables of a run in bytes, including journals."""
    size = 0
    for name in TABLES:
        files = (part_files(folder, name), journals_of(folder, name), block_files(folder) if name == "tensors" else {})
        for file in (file for listed in files for file in listed.values()):
            with suppress(FileNotFoundError):  # the journal was converted to Parquet in the meantime
                size += file.stat().st_size
    return size


def _with_keys(table: Table, columns: Sequence[str]) -> list[str]:
    """Return the columns, and those needed to restore the order in which the rows were written, or to read data in block files."""
    places = ("rank", *Place._fields) if table.name == "tensors" and "data" in columns else ()
    return list(dict.fromkeys([*columns, *(AS_WRITTEN if table.is_sorted else ()), *places]))
