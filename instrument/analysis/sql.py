"""`run.sql`: DuckDB on the files of the runs, with columns for seed and overrides.

Columns with one value per run are SQL expressions of the index of the file in the list. DuckDB computes them before it opens a
file, and skips the file if a condition excludes it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa

from ..errors import ConfigError, InstrumentError, Problem, similar_names
from ..fields.pip_extras import packages_of
from ..storage.remote_folder import is_address, safe_message
from ..storage.run_files import RunFiles
from ..tables.schemas import CUSTOM, TABLES
from ..tables.statistics import REMAINDERS
from .run_tables import RunTables

if TYPE_CHECKING:
    import duckdb
    import polars as pl

    from .duckdb_files import DuckDBFiles

T = TypeVar("T")
RUNS = "runs"
WHERE = "run.sql"
Columns = dict[str, pa.Array]
"""Arrays with one value per run, by column name."""
_TYPES = {pa.bool_(): "boolean", pa.int64(): "bigint", pa.float64(): "double", pa.string(): "varchar"}
_ALL_COLUMNS = re.compile(r"(?:\bselect|,|\.|\bdistinct)\s*\*|^\s*from\b|\bcolumns\s*\(", re.IGNORECASE)
_UNKNOWN = re.compile(r'(?i)Table with name "?(?P<table>[^"]*?)"? does not exist|column (?:named )?"(?P<column>[^"]+)"')


def run_query(run: RunTables, query: str) -> pd.DataFrame:
    """Run a query with DuckDB; only files of the tables that the query names are opened. See `Run.sql`."""

    def answer(connection: duckdb.DuckDBPyConnection) -> pd.DataFrame:
        if not connection.extract_statements(query):
            raise ConfigError(Problem(WHERE, "the query is empty", query))
        return connection.execute(query).df()

    if not isinstance(query, str):
        raise ConfigError(Problem(WHERE, "must be a query as text", repr(query)))
    return _with_tables(run, query, answer)


def lazy_frame(run: RunTables, table: str) -> pl.LazyFrame:
    """Return a table as a polars LazyFrame that DuckDB reads when it is collected. The selected rows are then in memory."""
    with packages_of("polars", "run.lazy"):
        import polars
        from polars.io.plugins import register_io_source
    query = f"select 1 from {table}"
    schema = _with_tables(run, query, lambda connection: connection.table(table).pl(lazy=True).collect_schema())

    def read(
        columns: list[str] | None, condition: pl.Expr | None, limit: int | None, _batch_size: int | None
    ) -> Iterator[pl.DataFrame]:
        def answer(connection: duckdb.DuckDBPyConnection) -> pl.DataFrame:
            stored = connection.table(table)
            rows = (stored if limit is None else stored.limit(limit)).pl(lazy=True)  # polars limits before it filters
            rows = rows.filter(polars.lit(True) if condition is None else condition)
            return rows.select(polars.all() if columns is None else columns).collect()

        names = "*" if columns is None else ", ".join(map(_quoted_name, columns))
        yield _with_tables(run, f"select {names} from {table}", answer)

    return register_io_source(read, schema=schema)


def _with_tables(run: RunTables, query: str, answer: Callable[[duckdb.DuckDBPyConnection], T]) -> T:
    """Return what a function returns for a connection with the tables that a query names.

    If it fails because of damaged or merged files, it is called again without these files.
    """
    with packages_of("sql", "SQL"):
        import duckdb
    from .duckdb_files import DuckDBFiles

    files = DuckDBFiles(run.folders[0])
    views = _Views(run, query, files)
    problems = (duckdb.ParserException, duckdb.CatalogException, duckdb.BinderException)
    while True:
        try:
            with duckdb.connect(config={"python_enable_replacements": "false"}) as connection:
                connection.register_filesystem(files)
                views.make(connection)
                return answer(connection)
        except problems as error:
            raise views.config_error(error) from None
        except (duckdb.Error, OSError) as error:
            if views.repair(only_heads=isinstance(error, duckdb.DataError)):
                continue
            if isinstance(error, duckdb.DataError | duckdb.ProgrammingError | duckdb.NotSupportedError):
                raise views.config_error(error) from None
            raise InstrumentError(f"{WHERE}: {safe_message(files.error or error)}") from None
        except Exception as error:  # storage clients raise many types of errors
            if isinstance(error, InstrumentError) or not views.remote:
                raise
            raise InstrumentError(f"{WHERE}: {safe_message(error)}") from None


class _Views:
    """The tables that a query names, as views of their files.

    Files are assumed to be valid until a query fails. Then deleted files are listed again, the footers of all files are
    checked, and finally all files are read.
    """

    def __init__(self, run: RunTables, query: str, files: DuckDBFiles) -> None:
        self.run = run
        self.files = files
        self.query = query
        self.names: list[str] = []
        self.remote = is_address(run.folders[0])
        self._listed: list[Path] = []
        self._uses_runs = False
        self._deleted: list[Path] = []
        self._union_by_name = False
        self._remedies = [RunFiles.check_footers, RunFiles.check_contents]

    def make(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Create the views."""
        import duckdb

        try:
            named = {name.lower() for name in connection.get_table_names(self.query)}
        except duckdb.Error:  # several statements, or an error that is reported when the query runs
            named = {RUNS, *TABLES}
        self.names = [name for name in TABLES if name in named]
        self._uses_runs = RUNS in named
        self._listed = []
        if self._uses_runs:
            connection.register(RUNS, pa.table(_columns_of_runs(self.run.runs)))
        for name in self.names:
            # DuckDB cannot read the data of tensors, which is in block files.
            has_data = "data" in self.query.lower() or _ALL_COLUMNS.search(self.query) is not None
            files = _table_files(self.run, name, with_data=name == "tensors" and has_data)
            self._listed += files.paths
            first = self.run.files[files.owners[0]] if files.paths else None
            by_name = self._union_by_name or (first is not None and first.lacks_columns(files.paths[0], name))
            selections = [self._selection(files, name, by_name=by_name)] if files.paths else []
            if len(files.unwritten) or not files.paths or by_name:
                connection.register(f"unwritten rows of {name}", files.unwritten)
                selections.append(f'select * from "unwritten rows of {name}"')
            rows = " union all by name ".join(selections)
            if CUSTOM in TABLES[name].columns:
                # One column per custom statistic or metric, and per remainder that the query names.
                remainders = [each for each in REMAINDERS.values() if name == "stats" and each in self.query.lower()]
                custom = [*self.run.custom_columns(name), *remainders]
                cells = {each: f"{CUSTOM.name}[{_quoted_string(each)}] as {_quoted_name(each)}" for each in custom}
                columns = [*_all_columns(self.run, name), *remainders]
                expressions = ", ".join(cells.get(each, _quoted_name(each)) for each in columns)
                rows = f"select {expressions} from ({rows})"
            connection.execute(f"create view {name} as {rows}")

    def repair(self, *, only_heads: bool) -> bool:
        """Return whether a cause of a failed query was found and removed. `only_heads`: the error is about a value, such as a cast."""
        deleted, self._deleted = self._deleted, [path for path in self._listed if not path.exists()]
        if self._deleted and self._deleted != deleted:
            return True
        remedy = self._remedies.pop(0) if self._remedies else None
        if remedy is None or (only_heads and remedy is RunFiles.check_contents):
            return False
        self._union_by_name = True
        for files in self.run.files:
            for name in self.names:
                with suppress(FileNotFoundError):  # the file was merged and will be listed under its new name
                    remedy(files, name)
        return True

    def config_error(self, error: Exception) -> ConfigError:
        """Convert an error of DuckDB, and add similar existing names for an unknown table or column."""
        message = safe_message(error).partition(": ")[2]
        unknown = _UNKNOWN.search(message)
        if unknown is None:
            return ConfigError(Problem(WHERE, message, self.query))
        if unknown["table"] is not None:
            names = [*TABLES, RUNS]
            return ConfigError(Problem(WHERE, message, self.query, names, similar_names(unknown["table"], names)))
        columns = [name for table in self.names for name in _all_columns(self.run, table)]
        columns += _columns_of_runs(self.run.runs) if self._uses_runs else []
        columns = list(dict.fromkeys(columns))
        return ConfigError(Problem(WHERE, message, self.query, columns, similar_names(unknown["column"], columns)))

    def _selection(self, files: _TableFiles, table: str, *, by_name: bool) -> str:
        first, last = (
            [f"{_lookup_expression(values, files.owners)} as {_quoted_name(name)}" for name, values in columns.items()]
            for columns in _run_columns(self.run, table)
        )
        names = ", ".join(_quoted_string(self.files.name(path)) for path in files.paths)
        options = f"hive_partitioning = false, union_by_name = {str(by_name).lower()}"
        return f"select {', '.join([*first, '*', *last])} from read_parquet([{names}], {options})"


def _lookup_expression(values: pa.Array, owners: Sequence[int]) -> str:
    """Return the SQL expression of a column: the value of the file's run, looked up by `file_index`.

    The values are stored in one string with fields of equal width, or in a list if that is not possible. DuckDB
    evaluates the expression for each file and for each vector of rows; the cost is proportional to the length of a
    list, but small for a string. A join with a table of files would not keep the order of the rows.
    """
    cells = values.to_pylist()
    words = ["" if value is None else _value_text(value) for value in cells]
    pairs = zip(words, cells, strict=True)
    if all(word.isascii() and word == word.strip() and bool(word) != (value is None) for word, value in pairs):
        width = max(map(len, words), default=0) or 1
        text = "".join(words[owner].ljust(width) for owner in owners)
        word = f"nullif(rtrim(substr({_quoted_string(text)}, cast(file_index as bigint) * {width} + 1, {width})), '')"
        return f"cast({word} as {_TYPES[values.type]})"
    items = ", ".join("null" if cells[owner] is None else _quoted_string(words[owner]) for owner in owners)
    return f"cast([{items}] as {_TYPES[values.type]}[])[cast(file_index as bigint) + 1]"


def _value_text(value: bool | int | float | str) -> str:
    return value if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else repr(value)


def _quoted_string(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _quoted_name(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


class _TableFiles(NamedTuple):
    """The files and rows of a table of several runs."""

    paths: list[Path]
    owners: list[int]  # the index of the run of each file
    unwritten: pa.Table  # the rows that are not in Parquet files yet, with all columns


def _run_columns(run: RunTables, table: str) -> tuple[Columns, Columns]:
    """Return the additional columns of a table of a sweep: those in front of its own columns, and those after them."""
    if not run.is_sweep:
        return {}, {}
    after = _columns_of_runs(run.settings, ["run", *run.own_columns(table)])
    return {"run": pa.array(run.names, pa.string())}, after


def _all_columns(run: RunTables, table: str) -> list[str]:
    before, after = _run_columns(run, table)
    return [*before, *run.own_columns(table), *after]


def _table_files(run: RunTables, table: str, *, with_data: bool) -> _TableFiles:
    """Return the files of a table. `with_data`: its rows instead, with the data in block files, which are mapped into memory."""
    paths: list[Path] = []
    owners: list[int] = []
    journals: list[pa.Table] = []
    writers: list[int] = []
    for number, files in enumerate(run.files):
        parts, rows = ([], [files.read(table)]) if with_data else files.table_files(table)
        paths += parts
        owners += [number] * len(parts)
        journals += rows
        writers += [number] * len(rows)
    unwritten = pa.concat_tables([TABLES[table].schema.empty_table(), *journals]).unify_dictionaries()
    of_rows = np.repeat(np.array(writers, np.int64), [len(journal) for journal in journals])
    before, after = _run_columns(run, table)
    columns = before | dict(zip(unwritten.schema.names, unwritten.columns, strict=True)) | after
    columns |= {name: values.take(of_rows) for name, values in (before | after).items()}
    return _TableFiles(paths, owners, pa.table(columns))


def _columns_of_runs(of_runs: pd.DataFrame, reserved: Collection[str] = ()) -> Columns:
    """Convert columns with one value per run to SQL types: text for mixed types, JSON for lists and mappings.

    A name that is reserved, in any case, becomes `override.<name>`.
    """
    names = {"", *(name.lower() for name in reserved)}
    columns = {}
    for key, values in of_runs.items():
        name = str(key)
        while name.lower() in names:
            name = f"override.{name}"
        names.add(name.lower())
        if values.dtype == object:
            cells = [None if pd.api.types.is_scalar(value) and pd.isna(value) else value for value in values]
            texts = [v if v is None or isinstance(v, str) else json.dumps(v) for v in cells]
            columns[name] = pa.array(texts, pa.string())
        else:
            array = pa.array(values)
            columns[name] = array.cast(pa.string()) if pa.types.is_large_string(array.type) else array
    return columns
