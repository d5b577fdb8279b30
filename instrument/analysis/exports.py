"""Files for other programs: the tables of a run as CSV, and the features of a layer as CSV, NumPy's `.npz` or Zarr."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from ..errors import ConfigError, Problem
from ..storage.run_files import RunFiles
from ..tables.schemas import TABLES
from .features import Features
from .frames import with_custom_columns
from .run_tables import RunTables

CHUNK_BYTES = 16 * 2**20
ROWS = 1024  # rows of a CSV file that are converted at once


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


def write_features_csv(features: Features, file: Path) -> None:
    """Write one row per sample: `sample`, `target` if there are targets, and the flattened features `f0`, `f1`, ...

    Raises:
        ConfigError: The features are complex numbers.
        OSError: The file cannot be written.
    """
    flat = features.flat
    if np.iscomplexobj(flat):
        raise ConfigError(Problem("--to", "CSV has no complex numbers", "csv", "npz, zarr"))
    flat = flat.astype(np.float32) if flat.dtype == np.float16 else flat  # Arrow writes no float16
    columns = {"sample": features.ids, **({} if features.y is None else {"target": features.y})}
    fields = [pa.field(name, _arrow(values[:0]).type) for name, values in columns.items()]
    schema = pa.schema([*fields, *(pa.field(f"f{i}", _arrow(flat[:0, i]).type) for i in range(flat.shape[1]))])
    with pyarrow.csv.CSVWriter(file, schema) as writer:
        for start in range(0, len(flat), ROWS):
            rows = slice(start, start + ROWS)
            arrays = [*(_arrow(values[rows]) for values in columns.values()), *map(_arrow, flat[rows].T)]
            writer.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))


def _arrow(values: np.ndarray[Any, Any]) -> pa.Array:
    return pa.array(values.astype(object), pa.string()) if values.dtype.kind == "U" else pa.array(values)


def write_npz(features: Features, file: Path) -> None:
    """Write the arrays `X`, `ids`, and `y` if there are targets; `numpy.load` reads them.

    Raises:
        OSError: The file cannot be written.
    """
    with file.open("wb") as stream:
        np.savez(stream, **_arrays(features))  # type: ignore[arg-type]


def write_zarr(features: Features, folder: Path) -> None:
    """Write a Zarr group (format 2, uncompressed) with the arrays `X`, `ids`, and `y` if there are targets.

    Raises:
        OSError: A file cannot be written.
    """
    folder.mkdir()
    (folder / ".zgroup").write_text(json.dumps({"zarr_format": 2}))
    for name, array in _arrays(features).items():
        rows = max(1, min(len(array), CHUNK_BYTES // max(1, array[:1].nbytes)))
        chunks = [rows, *array.shape[1:]]
        (folder / name).mkdir()
        layout = {
            "zarr_format": 2,
            "shape": list(array.shape),
            "chunks": chunks,
            "dtype": array.dtype.str,
            "compressor": None,
            "fill_value": None,
            "order": "C",
            "filters": None,
            "dimension_separator": ".",
        }
        (folder / name / ".zarray").write_text(json.dumps(layout))
        for number, start in enumerate(range(0, len(array), rows)):
            chunk = np.zeros(chunks, array.dtype)  # the last chunk is padded
            chunk[: len(array) - start] = array[start : start + rows]
            (folder / name / ".".join([str(number), *["0"] * (array.ndim - 1)])).write_bytes(chunk.tobytes())


def _arrays(features: Features) -> dict[str, np.ndarray[Any, Any]]:
    return {name: array for name, array in features._asdict().items() if array is not None}


FEATURE_WRITERS: dict[str, Callable[[Features, Path], None]] = {
    "csv": write_features_csv,
    "npz": write_npz,
    "zarr": write_zarr,
}
"""The functions that write features, by format: each takes the features and the path to write."""
