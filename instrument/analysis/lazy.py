"""`run.lazy`: polars on the files of the runs, with columns for seed and overrides.

Polars passes the filter conditions of a frame. Conditions on columns with one value per run select the runs whose files
are listed and opened. Conditions on columns of the table are passed to the Parquet reader, which skips row groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from ..capture.tables import TABLES
from ..errors import InstrumentError
from ..extras import pip_command
from ..sinks.remote import is_address
from .query import Listed, Queried

if TYPE_CHECKING:
    import polars as pl

FILE, RUN = "file of the run", "number of the run"  # temporary columns; other columns have no blanks in their names
CHUNK = 2**18  # rows per frame; the overhead of a frame is that of some thousand rows
READERS = 16  # runs that are checked, or read from a remote folder, in parallel


def scan(queried: Queried, table: str) -> pl.LazyFrame:
    """Return a table as a LazyFrame that reads the files when it is collected.

    Raises:
        InstrumentError: polars is not installed.
    """
    try:
        import polars  # noqa: F401
        from polars.io.plugins import register_io_source
    except ImportError:
        raise InstrumentError(f"run.lazy needs polars: {pip_command('polars')}") from None
    source = _Source(queried, table)
    return register_io_source(source.read, schema=source.schema)


class _Source:
    """The IO source that polars calls for each collection of a table.

    Attributes:
        own: Schema of the columns of the table.
        of_runs: Columns with one value per run; one row per run.
        nothing: An empty frame with all columns.
        schema: Schema of all columns.
    """

    def __init__(self, queried: Queried, table: str) -> None:
        import polars as pl

        self.queried = queried
        self.table = table
        before, behind = queried.columns(table)
        self.own = pl.DataFrame(pl.from_arrow(TABLES[table].schema.empty_table())).schema
        self.of_runs = pl.DataFrame({name: pl.Series(values) for name, values in (before | behind).items()})
        self.nothing = pl.DataFrame(schema={**self.own, **self.of_runs.schema}).select(*before, *self.own, *behind)
        self.schema = self.nothing.schema

    def read(
        self, with_columns: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, _batch_size: int | None
    ) -> Iterator[pl.DataFrame]:
        """Yield the rows that fulfill a condition, in the order of runs and files.

        Args:
            with_columns: Names of the columns; None for all.
            predicate: The condition; None for all rows.
            n_rows: Maximum number of rows; None for all.
            _batch_size: Ignored.

        Raises:
            InstrumentError: A file was damaged or merged after the first rows were returned.
            polars.exceptions.PolarsError: The condition is invalid.
        """
        left = n_rows
        for frame in _Question(self, self.schema.names() if with_columns is None else with_columns, predicate).answer():
            yield frame if left is None else frame.head(left)
            left = None if left is None else left - frame.height
            if left is not None and left <= 0:
                return


class _Question:
    """One collection: its columns, its conditions, and the selected runs."""

    def __init__(self, source: _Source, columns: Sequence[str], predicate: pl.Expr | None) -> None:
        import polars as pl

        self.source = source
        self.columns = columns
        self.conditions = [pl.lit(True)] if predicate is None else _conjuncts(predicate)
        source.nothing.filter(self.conditions)  # an invalid condition raises here, before files are read
        needed = {*columns, *(name for one in self.conditions for name in one.meta.root_names())}
        self.known = [name for name in source.of_runs.columns if name in needed]
        self.read = [name for name in source.own if name in needed] or source.own.names()[:1]
        self.runs = self._left()

    def answer(self) -> Iterator[pl.DataFrame]:
        """Yield the rows; files that are found to be damaged before the first row are reported and skipped."""
        import polars as pl

        gone: list[Path] = []
        while True:
            listed = self._listed()
            begun = False
            try:
                for frame in self._frames(listed):
                    begun = True
                    yield frame
                return
            except (pl.exceptions.ComputeError, OSError) as error:
                before, gone = gone, [path for path in listed.paths if not path.exists()]
                again = gone != before if gone else self._mended()
                if not again:
                    raise
                if begun:
                    told = "a file was damaged, or merged into another one, while it was read: collect once more"
                    raise InstrumentError(told) from error

    def _left(self) -> list[int]:
        """Return the runs selected by conditions that only use columns with one value per run."""
        known = self.source.of_runs.columns
        if not known:
            return list(range(len(self.source.queried.files)))
        left = self.source.of_runs.with_row_index(RUN)
        for condition in self.conditions:
            names = condition.meta.root_names()
            left = left.filter(condition) if names and set(names) <= set(known) else left
        return left[RUN].to_list()

    def _listed(self) -> Listed:
        """Return the files of the selected runs after checking their footers."""
        table, files = self.source.table, self.source.queried.files

        def look(run: int) -> None:
            files[run].while_merged(lambda: files[run].check(table), table)

        with ThreadPoolExecutor(READERS) as readers:
            list(readers.map(look, self.runs))
        return self.source.queried.listed(table, self.runs)

    def _mended(self) -> bool:
        """Return whether files were found to be damaged; these are no longer listed."""
        asked = [self.source.queried.files[run] for run in self.runs]
        before = [list(files.problems) for files in asked]
        for files in asked:
            files.read_through(self.source.table)
        return before != [files.problems for files in asked]

    def _frames(self, listed: Listed) -> Iterator[pl.DataFrame]:
        import polars as pl

        if listed.paths:
            yield from self._there(listed) if is_address(listed.paths[0]) else self._here(listed)
        if len(listed.unwritten):
            rows = pl.DataFrame(pl.from_arrow(listed.unwritten))
            yield rows.filter(self.conditions).select(self.columns)

    def _here(self, listed: Listed) -> Iterator[pl.DataFrame]:
        """Yield the rows of local files, using the reader of polars."""
        import polars as pl

        names = [str(path) for path in listed.paths]
        rows = pl.scan_parquet(
            names,
            schema=self.source.own,
            missing_columns="insert",
            extra_columns="ignore",
            glob=False,
            include_file_paths=FILE if self.known else None,
        )
        if self.known:
            of_runs = self.source.of_runs.select(self.known)[listed.owners].with_columns(pl.Series(FILE, names))
            rows = rows.join(of_runs.lazy(), on=FILE, how="left", maintain_order="left")
        yield from (
            rows.filter(self.conditions).select(self.columns).collect_batches(chunk_size=CHUNK, engine="streaming")
        )

    def _there(self, listed: Listed) -> Iterator[pl.DataFrame]:
        """Yield the rows of remote files run by run, using Arrow."""
        files: dict[int, list[Path]] = {}
        for path, run in zip(listed.paths, listed.owners, strict=True):
            files.setdefault(run, []).append(path)
        runs = list(files)
        with ThreadPoolExecutor(READERS) as readers:
            for start in range(0, len(runs), READERS):
                yield from readers.map(lambda run: self._of_run(run, files[run]), runs[start : start + READERS])

    def _of_run(self, run: int, paths: Sequence[Path]) -> pl.DataFrame:
        import polars as pl

        rows = pl.scan_pyarrow_dataset(self.source.queried.files[run].dataset(self.source.table, paths))
        for condition in self._for_arrow():
            rows = rows.filter(condition)
        read = rows.select(self.read).collect()
        of_run = self.source.of_runs.row(run, named=True) if self.known else {}
        known = [pl.lit(of_run[name], self.source.schema[name]).alias(name) for name in self.known]
        return read.with_columns(known).filter(self.conditions).select(self.columns)

    def _for_arrow(self) -> list[pl.Expr]:
        """Return the conditions on columns of the table only.

        Conditions on floats are excluded: polars treats NaN as the largest number, and Arrow does not.
        """
        own = self.source.own
        return [
            condition
            for condition in self.conditions
            if all(name in own and not own[name].is_float() for name in condition.meta.root_names())
        ]


def _conjuncts(condition: pl.Expr) -> list[pl.Expr]:
    """Split a condition at `and` into the conditions that must all hold."""
    parts = condition.meta.pop()
    if len(parts) == 2:
        for one, other in (parts, parts[::-1]):
            if (one & other).meta.eq(condition):
                return [*_conjuncts(one), *_conjuncts(other)]
    return [condition]
