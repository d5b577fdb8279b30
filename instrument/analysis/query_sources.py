"""Input of `run.sql` and `run.lazy`: the files of the runs, and columns with one value per run."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from ..tables.schemas import TABLES
from .frames import column_names
from .run_tables import RunTables

FILE = "file of the run"  # name of a temporary column; other columns have no blanks in their names
Columns = dict[str, pa.Array]
"""Arrays with one value per run, by column name."""


class TableFiles(NamedTuple):
    """The files and rows of a table of several runs.

    Attributes:
        owners: The index of the run of each file.
        unwritten: The rows that are not in Parquet files yet, with all columns.
    """

    paths: list[Path]
    owners: list[int]
    unwritten: pa.Table


def own_columns(run: RunTables, table: str) -> list[str]:
    """Return the columns that a table has without those of runs, with custom ones."""
    return column_names(TABLES[table].schema.names, run.custom_columns(table))


def run_columns(run: RunTables, table: str) -> tuple[Columns, Columns]:
    """Return the additional columns of a table of a sweep: those in front of its own columns, and those after them."""
    if not run.is_sweep:
        return {}, {}
    after = columns_of_runs(run.settings, ["run", *own_columns(run, table)])
    return {"run": pa.array(run.names, pa.string())}, after


def all_columns(run: RunTables, table: str) -> list[str]:
    """Return the columns of a table in their order."""
    before, after = run_columns(run, table)
    return [*before, *own_columns(run, table), *after]


def table_files(run: RunTables, table: str, runs: Iterable[int] | None = None) -> TableFiles:
    """Return the files of a table."""
    paths: list[Path] = []
    owners: list[int] = []
    journals: list[pa.Table] = []
    writers: list[int] = []
    for number in range(len(run.files)) if runs is None else runs:
        parts, rows = run.files[number].table_files(table)
        paths += parts
        owners += [number] * len(parts)
        journals += rows
        writers += [number] * len(rows)
    unwritten = pa.concat_tables([TABLES[table].schema.empty_table(), *journals]).unify_dictionaries()
    of_rows = np.repeat(np.array(writers, np.int64), [len(journal) for journal in journals])
    before, after = run_columns(run, table)
    columns = before | dict(zip(unwritten.schema.names, unwritten.columns, strict=True)) | after
    columns |= {name: values.take(of_rows) for name, values in (before | after).items()}
    return TableFiles(paths, owners, pa.table(columns))


def columns_of_runs(of_runs: pd.DataFrame, reserved: Collection[str] = ()) -> Columns:
    """Convert columns with one value per run to SQL types: text for mixed types, JSON for lists and mappings.

    Args:
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
    if values.dtype == object:
        cells = [None if pd.api.types.is_scalar(value) and pd.isna(value) else value for value in values]
        return pa.array([v if v is None or isinstance(v, str) else json.dumps(v) for v in cells], pa.string())
    array = pa.array(values)
    return array.cast(pa.string()) if pa.types.is_large_string(array.type) else array
