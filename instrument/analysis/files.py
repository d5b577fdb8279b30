"""What can be read of a run's folder, whatever state it is in: running, done, killed, damaged."""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from ..capture.tables import TABLES, Table, as_table
from ..errors import InstrumentWarning
from ..sinks.journal import Reading
from ..sinks.lock import is_locked
from ..sinks.parts import Part, foreign_files, journals_of, parts_of
from ..sinks.remote import arrow_files, arrow_name
from ..spec.statistics import STATISTICS

ADDED = {statistic.name for statistic in STATISTICS.values() if not statistic.default}
"""Columns that runs of earlier versions may lack; they are null there."""


class RunFiles:
    """The files of one run; what is wrong with any of them is added to `problems`, and the rest is read.

    Attributes:
        folder: The run's folder.
        problems: What is wrong, in words, each with the name of the file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.problems: list[str] = []
        self._arrow = arrow_files(folder)
        for file in foreign_files(folder) if self._arrow is None else ():
            self._problem(file, "no file of a run: it is not read")

    def info(self) -> dict[str, Any]:
        """run.json, as far as it can be read. A run of this machine that says it is running and whose process is gone was killed."""
        path = self.folder / "run.json"
        try:
            info = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            self._problem(path, f"cannot be read: {error}")
            info = None
        if not isinstance(info, dict):
            info = {}
        info = {"status": "unknown", "seed": None, **info}
        for name in ("overrides", "metrics"):
            if not isinstance(info.get(name), dict):
                info[name] = {}
        if info["status"] == "running" and self._arrow is None and not is_locked(self.folder):
            info["status"] = "killed"
        return info

    def dataset(self, name: str) -> ds.Dataset:
        """A table, unread: its parts, and the journals of what is in no part yet."""
        table = TABLES[name]
        journals = self._journals(table)  # first of all: one that becomes a part meanwhile is met as that part
        parts = {part: file for part, file in parts_of(self.folder, name).items() if self._is_sound(file, table)}
        names = [arrow_name(file) for file in parts.values()]
        found = [ds.dataset(names, schema=table.schema, format="parquet", filesystem=self._arrow)]
        found += [ds.dataset(rows) for part, rows in journals.items() if part not in parts]
        return ds.dataset(found) if parts else ds.dataset(found[1:] or table.schema.empty_table())

    def read(self, name: str, columns: Sequence[str] | None = None, condition: ds.Expression | None = None) -> pa.Table:
        """A table's rows: some columns, where a condition holds."""
        whole = self.dataset(name)
        wanted = None if columns is None else list(columns)
        try:
            return whole.to_table(columns=wanted, filter=condition)
        except (pa.ArrowException, OSError):
            return self._read_one_by_one(whole, wanted, condition)

    def scan(
        self, name: str, columns: Sequence[str], condition: ds.Expression | None = None
    ) -> Iterator[pa.RecordBatch]:
        """The same in batches, in the order in which the rows were written: for tables that are larger than memory."""
        whole = self.dataset(name)
        for fragment in whole.get_fragments():
            try:
                yield from fragment.to_batches(schema=whole.schema, columns=list(columns), filter=condition)
            except (pa.ArrowException, OSError) as error:
                self._problem(self._file(fragment.path), f"cannot be read: {_first_line(error)}")

    def count(self, name: str) -> int:
        """The number of a table's rows, without reading them."""
        count = 0
        for fragment in self.dataset(name).get_fragments():
            try:
                count += fragment.count_rows()
            except (pa.ArrowException, OSError) as error:
                self._problem(self._file(fragment.path), f"cannot be read: {_first_line(error)}")
        return count

    def note_left_out(self, table: str, what: str) -> None:
        """Add to the problems what a reader cannot make use of."""
        self._problem(self.folder / table, f"{what}: left out")

    def _read_one_by_one(
        self, whole: ds.Dataset, columns: list[str] | None, condition: ds.Expression | None
    ) -> pa.Table:
        """File by file, without those that are damaged inside."""
        read = []
        for fragment in whole.get_fragments():
            try:
                read.append(fragment.to_table(schema=whole.schema, columns=columns, filter=condition))
            except (pa.ArrowException, OSError) as error:
                self._problem(self._file(fragment.path), f"cannot be read: {_first_line(error)}")
        return pa.concat_tables([whole.schema.empty_table().select(columns or whole.schema.names), *read])

    def _journals(self, table: Table) -> dict[Part, pa.Table]:
        found = {}
        journals = journals_of(self.folder, table.name) if self._arrow is None else {}  # they are never sent
        for (_, part), path in journals.items():
            try:
                reading = Reading.of(path)
            except FileNotFoundError:
                continue  # it is a part by now
            if reading.schema is not None and reading.schema != table.plain_schema:
                reading.problem = "the columns are not those of this table: it is not read"
            elif reading.schema is not None:
                found[part] = as_table(table, list(reading.batches()))
            if reading.problem is not None:
                self._problem(path, reading.problem)
        return found

    def _is_sound(self, file: Path, table: Table) -> bool:
        try:
            columns = set(pq.read_schema(arrow_name(file), filesystem=self._arrow).names)
        except (pa.ArrowException, OSError) as error:
            self._problem(file, f"cannot be read: {_first_line(error)}")
            return False
        if missing := [name for name in table.names if name not in columns and name not in ADDED]:
            self._problem(file, f"has no column {', '.join(missing)}: it is not read")
        return not missing

    def _file(self, name: str) -> Path:
        """A file, by what Arrow calls it."""
        return self.folder / os.path.relpath(name, arrow_name(self.folder))

    def _problem(self, file: Path, problem: str) -> None:
        told = f"{file.relative_to(self.folder)}: {problem}"
        if told not in self.problems:
            self.problems.append(told)
            warnings.warn(f"{self.folder}: {told}", InstrumentWarning, stacklevel=2)


def size_on_disk(folder: Path) -> int:
    """The bytes of a run's tables, parts and journals together."""
    size = 0
    for name in TABLES:
        for file in (*parts_of(folder, name).values(), *journals_of(folder, name).values()):
            with suppress(FileNotFoundError):  # a journal that became a part meanwhile
                size += file.stat().st_size
    return size


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]
