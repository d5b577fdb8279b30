"""`run.lazy`: polars on the files themselves, with what the runs were started with.

Polars hands over the conditions that a frame is filtered by. What they say of columns that are one value a run chooses the
runs whose files are listed and opened; what they say of a table's own columns goes to the reader, which leaves out row groups.
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

FILE, RUN = "file of the run", "number of the run"  # columns on the way; no column of ours has blanks in its name
CHUNK = 2**18  # rows that are handed to polars at once: each frame costs as much as some thousand of them
READERS = 16  # runs that are looked into, or read from a remote folder, at once


def scan(queried: Queried, table: str) -> pl.LazyFrame:
    """A table as polars reads it from its files when it is collected.

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
    """What polars asks for the rows of a table, each time that it collects.

    Attributes:
        own: The table's own columns.
        of_runs: Those that are one value a run: a row a run.
        nothing: A frame of all of them, without a row.
        schema: Their types.
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
        """Some columns of the rows that a condition holds for, in the order of runs and files; so many rows at most.

        Raises:
            InstrumentError: A file was damaged, or merged into another one, when part of the answer was given already.
            polars.exceptions.PolarsError: The condition makes no sense.
        """
        left = n_rows
        for frame in _Question(self, self.schema.names() if with_columns is None else with_columns, predicate).answer():
            yield frame if left is None else frame.head(left)
            left = None if left is None else left - frame.height
            if left is not None and left <= 0:
                return


class _Question:
    """One collection: its columns, its conditions, and the runs that these leave."""

    def __init__(self, source: _Source, columns: Sequence[str], predicate: pl.Expr | None) -> None:
        import polars as pl

        self.source = source
        self.columns = columns
        self.conditions = [pl.lit(True)] if predicate is None else _conjuncts(predicate)
        source.nothing.filter(self.conditions)  # one that makes no sense fails here, before anything is read
        needed = {*columns, *(name for one in self.conditions for name in one.meta.root_names())}
        self.known = [name for name in source.of_runs.columns if name in needed]
        self.read = [name for name in source.own if name in needed] or source.own.names()[:1]
        self.runs = self._left()

    def answer(self) -> Iterator[pl.DataFrame]:
        """The rows; files that turn out to be damaged before the first of them are named and left out."""
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
        """The runs that conditions on nothing but their columns leave."""
        known = self.source.of_runs.columns
        if not known:
            return list(range(len(self.source.queried.files)))
        left = self.source.of_runs.with_row_index(RUN)
        for condition in self.conditions:
            names = condition.meta.root_names()
            left = left.filter(condition) if names and set(names) <= set(known) else left
        return left[RUN].to_list()

    def _listed(self) -> Listed:
        """The files of these runs, with all heads looked into."""
        table, files = self.source.table, self.source.queried.files

        def look(run: int) -> None:
            files[run].while_merged(lambda: files[run].check(table), table)

        with ThreadPoolExecutor(READERS) as readers:
            list(readers.map(look, self.runs))
        return self.source.queried.listed(table, self.runs)

    def _mended(self) -> bool:
        """Whether files that could not be read were damaged; these are listed no more."""
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
        """What is in files of this machine, by polars' own reader."""
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
        """What is in a remote folder, by Arrow, run by run."""
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
        """The conditions on columns of the table alone; to Arrow NaN is not the largest number, as it is to polars."""
        own = self.source.own
        return [
            condition
            for condition in self.conditions
            if all(name in own and not own[name].is_float() for name in condition.meta.root_names())
        ]


def _conjuncts(condition: pl.Expr) -> list[pl.Expr]:
    """The conditions that are all to hold, of one that joins them by `and`."""
    parts = condition.meta.pop()
    if len(parts) == 2:
        for one, other in (parts, parts[::-1]):
            if (one & other).meta.eq(condition):
                return [*_conjuncts(one), *_conjuncts(other)]
    return [condition]
