"""`run.lazy`: polars on the files of the runs, with columns for seed and overrides.

Polars passes the filter conditions of a frame. Conditions on columns with one value per run select the runs whose files
are listed and opened. Conditions on columns of the table are passed to the Parquet reader, which skips row groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InstrumentError
from ..fields.pip_extras import pip_command
from ..storage.remote_folder import is_address
from ..tables.schemas import CUSTOM, TABLES
from . import query_sources
from .frames import column_names
from .query_sources import FILE, TableFiles, run_columns
from .run_tables import RunTables

if TYPE_CHECKING:
    import polars as pl

RUN = "number of the run"  # temporary column; see FILE
CHUNK = 2**18  # rows per frame; the overhead of a frame is that of some thousand rows
READERS = 16  # runs that are checked, or read from a remote folder, in parallel


def scan(run: RunTables, table: str, extra_custom: Sequence[str] = ()) -> pl.LazyFrame:
    """Return a table as a LazyFrame that reads the files when it is collected.

    Raises:
        InstrumentError: polars is not installed.
    """
    try:
        import polars
        from polars.io.plugins import register_io_source
    except ImportError:
        raise InstrumentError(f"run.lazy requires polars: {pip_command('polars')}") from None
    source = _Source(run, table)
    rows = register_io_source(source.read, schema=source.schema)
    if CUSTOM.name not in source.schema:
        return rows
    names = [*run.custom_columns(table), *extra_custom]
    custom = [polars.col(CUSTOM.name).map.get(name).alias(name) for name in names]
    return rows.with_columns(custom).select(column_names(source.schema.names(), names))


class _Source:
    """The IO source that polars calls for each collection of a table. `run_columns`: one row per run."""

    def __init__(self, run: RunTables, table: str) -> None:
        import polars as pl

        self.run = run
        self.table = table
        before, after = run_columns(run, table)
        self.table_schema = pl.DataFrame(pl.from_arrow(TABLES[table].schema.empty_table())).schema
        self.run_columns = pl.DataFrame({name: pl.Series(values) for name, values in (before | after).items()})
        self.empty = pl.DataFrame(schema={**self.table_schema, **self.run_columns.schema}).select(
            *before, *self.table_schema, *after
        )
        self.schema = self.empty.schema

    def read(
        self, with_columns: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, _batch_size: int | None
    ) -> Iterator[pl.DataFrame]:
        """Yield the rows that fulfill a condition, in the order of runs and files."""
        left = n_rows
        for frame in _Collection(
            self, self.schema.names() if with_columns is None else with_columns, predicate
        ).frames():
            yield frame if left is None else frame.head(left)
            left = None if left is None else left - frame.height
            if left is not None and left <= 0:
                return


class _Collection:
    """One collection: its columns, its conditions, and the selected runs."""

    def __init__(self, source: _Source, columns: Sequence[str], predicate: pl.Expr | None) -> None:
        import polars as pl

        self.source = source
        self.columns = columns
        self.conditions = [pl.lit(True)] if predicate is None else _conjuncts(predicate)
        source.empty.filter(self.conditions)  # an invalid condition raises here, before files are read
        needed = {*columns, *(name for one in self.conditions for name in one.meta.root_names())}
        self.run_column_names = [name for name in source.run_columns.columns if name in needed]
        self.read = [name for name in source.table_schema if name in needed] or source.table_schema.names()[:1]
        self.runs = self._selected_runs()

    def frames(self) -> Iterator[pl.DataFrame]:
        """Yield the rows; files that are found to be damaged before the first row are reported and skipped."""
        import polars as pl

        gone: list[Path] = []
        while True:
            table_files = self._table_files()
            begun = False
            try:
                for frame in self._frames(table_files):
                    begun = True
                    yield frame
                return
            except (pl.exceptions.ComputeError, OSError) as error:
                before, gone = gone, [path for path in table_files.paths if not path.exists()]
                again = gone != before if gone else self._found_damage()
                if not again:
                    raise
                if begun:
                    message = "a file was damaged or merged into another file while it was read: call collect() again"
                    raise InstrumentError(message) from error

    def _selected_runs(self) -> list[int]:
        """Return the runs selected by conditions that only use columns with one value per run."""
        run_column_names = self.source.run_columns.columns
        if not run_column_names:
            return list(range(len(self.source.run.files)))
        left = self.source.run_columns.with_row_index(RUN)
        for condition in self.conditions:
            names = condition.meta.root_names()
            left = left.filter(condition) if names and set(names) <= set(run_column_names) else left
        return left[RUN].to_list()

    def _table_files(self) -> TableFiles:
        """Return the files of the selected runs, after verifying their checksums, which polars does not verify."""
        table, files = self.source.table, self.source.run.files

        def check(run: int) -> None:
            files[run].retry_if_merged(lambda: files[run].check_columns(table, self.read), table)

        with ThreadPoolExecutor(READERS) as readers:
            list(readers.map(check, self.runs))
        return query_sources.table_files(self.source.run, table, self.runs)

    def _found_damage(self) -> bool:
        """Return whether files were found to be damaged; these are no longer listed."""
        checked = [self.source.run.files[run] for run in self.runs]
        old_problems = [list(files.problems) for files in checked]
        for files in checked:
            files.check_contents(self.source.table)
        return old_problems != [files.problems for files in checked]

    def _frames(self, table_files: TableFiles) -> Iterator[pl.DataFrame]:
        import polars as pl

        if table_files.paths:
            yield from (
                self._remote_frames(table_files)
                if is_address(table_files.paths[0])
                else self._local_frames(table_files)
            )
        if len(table_files.unwritten):
            rows = pl.DataFrame(pl.from_arrow(table_files.unwritten))
            yield rows.filter(self.conditions).select(self.columns)

    def _local_frames(self, table_files: TableFiles) -> Iterator[pl.DataFrame]:
        """Yield the rows of local files, using the reader of polars."""
        import polars as pl

        names = [str(path) for path in table_files.paths]
        rows = pl.scan_parquet(
            names,
            schema=self.source.table_schema,
            missing_columns="insert",
            extra_columns="ignore",
            glob=False,
            hive_partitioning=False,
            include_file_paths=FILE if self.run_column_names else None,
        )
        if self.run_column_names:
            run_columns = self.source.run_columns.select(self.run_column_names)[table_files.owners].with_columns(
                pl.Series(FILE, names)
            )
            rows = rows.join(run_columns.lazy(), on=FILE, how="left", maintain_order="left")
        yield from (
            rows.filter(self.conditions).select(self.columns).collect_batches(chunk_size=CHUNK, engine="streaming")
        )

    def _remote_frames(self, table_files: TableFiles) -> Iterator[pl.DataFrame]:
        """Yield the rows of remote files run by run, using Arrow."""
        files: dict[int, list[Path]] = {}
        for path, run in zip(table_files.paths, table_files.owners, strict=True):
            files.setdefault(run, []).append(path)
        runs = list(files)
        with ThreadPoolExecutor(READERS) as readers:
            for start in range(0, len(runs), READERS):
                yield from readers.map(lambda run: self._run_frame(run, files[run]), runs[start : start + READERS])

    def _run_frame(self, run: int, paths: Sequence[Path]) -> pl.DataFrame:
        import polars as pl

        rows = pl.scan_pyarrow_dataset(self.source.run.files[run].dataset(self.source.table, paths))
        for condition in self._arrow_conditions():
            rows = rows.filter(condition)
        read = rows.select(self.read).collect()
        of_run = self.source.run_columns.row(run, named=True) if self.run_column_names else {}
        run_value_columns = [
            pl.lit(of_run[name], self.source.schema[name]).alias(name) for name in self.run_column_names
        ]
        return read.with_columns(run_value_columns).filter(self.conditions).select(self.columns)

    def _arrow_conditions(self) -> list[pl.Expr]:
        """Return the conditions on columns of the table only, without floats, whose NaN Arrow compares in another way."""
        table_schema = self.source.table_schema
        return [
            condition
            for condition in self.conditions
            if all(name in table_schema and not table_schema[name].is_float() for name in condition.meta.root_names())
        ]


def _conjuncts(condition: pl.Expr) -> list[pl.Expr]:
    """Split a condition at `and` into the conditions that must all hold."""
    parts = condition.meta.pop()
    if len(parts) == 2:
        for one, other in (parts, parts[::-1]):
            if (one & other).meta.eq(condition):
                return [*_conjuncts(one), *_conjuncts(other)]
    return [condition]
