"""Export of the tables of a run to CSV, one file per table."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.csv

from ..spec.tables import TABLES
from .custom_columns import with_custom_columns
from .run_files import RunFiles
from .run_tables import RunTables


def write_csv(files: RunFiles, folder: Path) -> None:
    """Write all tables except `tensors` into an existing folder; lists are written as JSON.

    Raises:
        OSError: A file cannot be written.
    """
    run = RunTables(files.folder, [files.folder], [files])
    for name, table in TABLES.items():
        if name == "tensors":
            continue
        columns = with_custom_columns(table.schema.empty_table(), run.custom_columns(name)).schema
        schema = pa.schema([pa.field(column.name, _csv_type(column.type)) for column in columns])
        with pyarrow.csv.CSVWriter(folder / f"{name}.csv", schema) as writer:
            for batch in run.scan(name, columns.names):
                cells = [_csv_cells(values, field.type) for values, field in zip(batch.columns, schema, strict=True)]
                writer.write_batch(pa.RecordBatch.from_arrays(cells, schema=schema))


def _csv_type(kind: pa.DataType) -> pa.DataType:
    return pa.string() if pa.types.is_list(kind) or pa.types.is_dictionary(kind) else kind


def _csv_cells(values: pa.Array, kind: pa.DataType) -> pa.Array:
    if pa.types.is_list(values.type):
        return pa.array([None if cell is None else json.dumps(cell) for cell in values.to_pylist()], pa.string())
    return values.cast(kind)
