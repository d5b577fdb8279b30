"""Input of `run.sql` and `run.lazy`: the files of the runs, and columns with one value per run."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from ..spec.tables import TABLES
from .frames import column_names
from .run_files import RunFiles

FILE = "file of the run"  # name of a temporary column; other columns have no blanks in their names
Columns = dict[str, pa.Array]
"""Arrays with one value per run, by column name."""
_KINDS = (
    (pd.api.types.is_bool_dtype, pa.bool_()),
    (pd.api.types.is_integer_dtype, pa.int64()),
    (pd.api.types.is_float_dtype, pa.float64()),
)


class TableFiles(NamedTuple):
    """The files and rows of a table of several runs.

    Attributes:
        paths: The Parquet files.
        owners: The index of the run of each file.
        unwritten: The rows that are not in Parquet files yet, with all columns.
    """

    paths: list[Path]
    owners: list[int]
    unwritten: pa.Table


@dataclass(frozen=True)
class RunsToQuery:
    """The runs that are queried.

    Attributes:
        files: The files of each run.
        names: The folder of each run relative to the opened folder; None for a single run, whose tables have no
            additional columns.
        run_settings: The seed and the overrides of each run.
        runs: The table `runs`, which includes these columns.
        custom: Returns the names of the custom statistics or metrics of all runs, further columns of a table.
    """

    files: Sequence[RunFiles]
    names: Sequence[str] | None
    run_settings: pd.DataFrame
    runs: pd.DataFrame
    custom: Callable[[str], Sequence[str]]

    def own_columns(self, table: str) -> list[str]:
        """Return the columns that a table has without those of runs, with custom ones."""
        return column_names(TABLES[table].schema.names, self.custom(table))

    def columns(self, table: str) -> tuple[Columns, Columns]:
        """Return the additional columns of a table: those in front of its own columns, and those after them."""
        if self.names is None:
            return {}, {}
        return {"run": pa.array(self.names, pa.string())}, columns_of_runs(
            self.run_settings, ["run", *self.own_columns(table)]
        )

    def table_files(self, table: str, runs: Iterable[int] | None = None) -> TableFiles:
        """Return the files of a table.

        Args:
            table: Name of the table.
            runs: Indices of the runs; None for all.
        """
        paths: list[Path] = []
        owners: list[int] = []
        journals: list[pa.Table] = []
        writers: list[int] = []
        for number in range(len(self.files)) if runs is None else runs:
            parts, rows = self.files[number].table_files(table)
            paths += parts
            owners += [number] * len(parts)
            journals += rows
            writers += [number] * len(rows)
        return TableFiles(paths, owners, self._unwritten(table, journals, writers))

    def _unwritten(self, table: str, journals: Sequence[pa.Table], writers: Sequence[int]) -> pa.Table:
        rows = pa.concat_tables([TABLES[table].schema.empty_table(), *journals]).unify_dictionaries()
        owners = np.repeat(np.array(writers, np.int64), [len(journal) for journal in journals])
        before, after = self.columns(table)
        first, last = ([values.take(owners) for values in columns.values()] for columns in (before, after))
        return pa.table([*first, *rows.columns, *last], names=[*before, *rows.schema.names, *after])


def columns_of_runs(of_runs: pd.DataFrame, reserved: Collection[str] = ()) -> Columns:
    """Convert columns with one value per run to SQL types: text for mixed types, JSON for lists and mappings.

    Args:
        of_runs: One row per run.
        reserved: Reserved names, compared without case; a column with such a name is renamed to `override.<name>`.
    """
    names = {"", *(name.lower() for name in reserved)}
    columns = {}
    for key, values in of_runs.items():
        name = str(key)
        while name.lower() in names:
            name = f"override.{name}"
        names.add(name.lower())
        columns[name] = _plain(values)
    return columns


def _plain(values: pd.Series) -> pa.Array:
    for test, kind in _KINDS:
        if test(values.dtype):
            return pa.array(values, kind)
    cells = [None if pd.api.types.is_scalar(value) and pd.isna(value) else value for value in values]
    return pa.array([v if v is None or isinstance(v, str) else json.dumps(v) for v in cells], pa.string())
