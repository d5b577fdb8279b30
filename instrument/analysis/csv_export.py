"""Export of the tables of a run to CSV, one file per table."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.csv

from ..spec.tables import CUSTOM, TABLES
from .custom_columns import custom_columns_of, with_custom_columns
from .run_files import RunFiles


def write_csv(files: RunFiles, folder: Path) -> None:
    """Write all tables except `tensors` into an existing folder; lists are written as JSON.

    Raises:
        OSError: A file cannot be written.
    """
    for name, table in TABLES.items():
        if name == "tensors":
            continue
        custom = custom_columns_of(files, name) if CUSTOM in table.columns else ()
        empty = with_custom_columns(table.schema.empty_table(), custom)
        schema = pa.schema([pa.field(field.name, _csv_type(field.type)) for field in empty.schema])
        with pyarrow.csv.CSVWriter(folder / f"{name}.csv", schema) as writer:
            for batch in files.scan(name, table.schema.names):
                rows = with_custom_columns(pa.Table.from_batches([batch]), custom).combine_chunks()
                columns = [_csv_column(column, field.type) for column, field in zip(rows.columns, schema, strict=True)]
                writer.write_table(pa.Table.from_arrays(columns, schema=schema))


def _csv_type(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_list(kind) or pa.types.is_dictionary(kind) else kind


def _csv_column(column: pa.ChunkedArray, kind: pa.DataType) -> pa.Array | pa.ChunkedArray:
    if pa.types.is_list(column.type):
        return pa.array([None if cell is None else json.dumps(cell) for cell in column.to_pylist()], pa.string())
    return column.cast(kind)
