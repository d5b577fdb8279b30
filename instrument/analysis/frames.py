"""Conversion of rows and configuration values to columns of DataFrames.

The files contain custom statistics and metrics in one column, by name.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pandas.api.types import infer_dtype

from ..config.hook_specs import names_of_custom_statistics
from ..storage.run_files import RunFiles
from ..tables.schemas import CUSTOM
from ..tables.statistics import REMAINDERS

SCALED = "int8_scaled"
"""The dtype of 8-bit integers with a scale per row, see `instrument.values.int8_rows`."""
LARGEST = 2**63  # the smallest positive integer that does not fit into int64


def plain_labels(table: pa.Table) -> pa.Table:
    """Convert dictionary columns to plain strings, which pandas compares, groups and concatenates as expected."""
    for i, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(i, field.name, table.column(i).cast(pa.string()))
    return table


def to_frame(table: pa.Table) -> pd.DataFrame:
    """Return a table as a DataFrame. Fingerprints are Int64, because float64 would round them."""
    frame: pd.DataFrame = plain_labels(table).to_pandas(maps_as_pydicts="strict")
    if "fingerprint" in frame:
        frame["fingerprint"] = table["fingerprint"].to_pandas(types_mapper={pa.int64(): pd.Int64Dtype()}.get)
    return frame


def without_unknown_types(frame: pd.DataFrame, files: RunFiles) -> pd.DataFrame:
    """Remove tensors of dtypes that NumPy does not support, and add the dtypes to the problems of the files."""
    is_supported = frame["dtype"].map(is_known).astype(bool)
    for dtype in frame["dtype"][~is_supported].unique():
        files.report_skipped(f"NumPy does not support {dtype}")
    return frame if is_supported.all() else frame[is_supported].reset_index(drop=True)


def with_arrays(frame: pd.DataFrame) -> pd.DataFrame:
    """Return rows of tensors with `values` as arrays and with shapes as tuples."""
    cells = zip(frame["values"], frame["data"], frame["shape"], frame["dtype"], strict=True)
    return frame.assign(
        values=pd.Series([array_of(*cell) for cell in cells], dtype=object),
        shape=pd.Series([tuple(shape) for shape in frame["shape"]], dtype=object),
        source_shape=pd.Series([tuple(shape) for shape in frame["source_shape"]], dtype=object),
    ).drop(columns="data")


def add_overrides(frame: pd.DataFrame, run: str, overrides: pd.DataFrame, index: int) -> None:
    """Add the folder, seed and overrides of a run as columns, in place. A name that the table has becomes `override.<name>`.

    The overrides are those of all runs, so that a column has the same type in all of them.
    """
    frame.insert(0, "run", run)
    for key, values in overrides.items():
        name = f"override.{key}" if key in frame.columns else key
        frame[name] = values.iloc[[index] * len(frame)].set_axis(frame.index)


def floats(column: pa.Array | pa.ChunkedArray) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return a column as float64; missing values are NaN, and fingerprints are rounded."""
    return np.asarray(column.cast(pa.float64(), safe=False))


def typed(values: Sequence[Any]) -> pd.Series:
    """Return values as a column of integers, floats, booleans or strings if all are of this type, otherwise of objects.

    Integers among floats are converted to floats. Columns with nulls use the pandas types Int64 and boolean, so that
    nulls do not change the type.
    """
    present = [value for value in values if value is not None]
    is_complete, fits = len(present) == len(values), all(-LARGEST <= v < LARGEST for v in present if isinstance(v, int))
    dtypes = {
        "integer": "int64" if is_complete else "Int64",
        "boolean": "bool" if is_complete else "boolean",
        "string": "str",
        **dict.fromkeys(("floating", "integer-na", "mixed-integer-float", "empty"), "float64"),
    }
    return pd.Series(list(values), dtype=dtypes.get(infer_dtype(present, skipna=False) if fits else "", "object"))


def typed_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows as a DataFrame with typed columns.

    Keys that a row lacks are null. In object columns a missing key is NaN, and a null value is None.
    """
    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: typed([row.get(name) for row in rows]) for name in names}
    for name in [name for name, column in columns.items() if column.dtype == object]:
        columns[name] = pd.Series([row.get(name, math.nan) for row in rows], dtype=object)
    return pd.DataFrame(columns, index=range(len(rows)))


def custom_statistics_of(infos: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of the custom statistics of some runs, each once."""
    configs = (info.get("config") for info in infos)
    hooks = (config.get("hooks") for config in configs if isinstance(config, Mapping))
    return tuple(dict.fromkeys(name for each in hooks for name in names_of_custom_statistics(each)))


def custom_metrics_in(parts: Iterable[pa.Array]) -> list[str]:
    """Return the names in the column that contains the custom metrics, in the order of their first values."""
    names: dict[str, None] = {}
    for cells in parts:
        if cells.null_count < len(cells):
            names |= dict.fromkeys(pc.unique(cells.drop_null().keys).to_pylist())
    return list(names)


def with_custom_columns(rows: pa.Table, names: Sequence[str]) -> pa.Table:
    """Replace the column that contains the custom statistics or metrics, if there is one, by one column per name."""
    index = rows.schema.get_field_index(CUSTOM.name)
    if index < 0:
        return rows
    cells = rows.column(index)
    rows = rows.remove_column(index)
    for i, name in enumerate(names):
        rows = rows.add_column(index + i, name, pc.map_lookup(cells, pa.scalar(name), "first"))
    return rows


def set_exact_integers(frame: pd.DataFrame, rows: pa.Table) -> None:
    """Replace extremes that float64 rounds by exact integers of dtype object, in place. `rows`: the stored rows with the remainders."""
    index = rows.schema.get_field_index(CUSTOM.name)
    if index < 0 or rows.column(index).null_count == len(rows):
        return
    for name, remainder in REMAINDERS.items():
        rests = pc.map_lookup(rows.column(index), pa.scalar(remainder), "first").to_pylist()
        if name in frame and any(rests):
            values = zip(frame[name].tolist(), rests, strict=True)
            exact = [value if rest is None else int(value) + int(rest) for value, rest in values]
            frame[name] = pd.Series(exact, index=frame.index, dtype=object)


_Array = np.ndarray[Any, Any]


def array_of(values: Any, data: Any, shape: Any, dtype: str, *, copy: bool = True) -> _Array:
    """Return a recorded tensor as an array; types that NumPy does not support are converted to a wider type.

    The elements are a flat sequence of numbers in `values`, or little-endian bytes in `data`; the other one is None. `dtype` is the name in
    PyTorch, or `int8_scaled`: bfloat16, float8 and 8 bits with scales are converted to float32, complex32 to complex64. `copy`: whether
    float32 elements in `values` are copied. Raise a TypeError if the dtype is not supported; see `is_known`.
    """
    if data is None:
        array = np.asarray(values, dtype=np.float32)
        exact = {"float16": np.float16, "bool": np.bool_, "uint8": np.uint8, "int8": np.int8, "int16": np.int16}
        return array.astype(exact.get(dtype, np.float32), copy=copy).reshape(shape)
    return _from_bytes(data, dtype, shape[-1] if len(shape) else 1).reshape(shape)


def cells_of(name: str, column: pa.Array | pa.ChunkedArray) -> Iterable[Any]:
    """Return the cells of a column; the elements of recorded tensors are arrays and buffers that are views of it."""
    if name == "values":
        return (None if not cell.is_valid else cell.values.to_numpy(zero_copy_only=False) for cell in column)
    if name == "data":
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        return (buffer for chunk in chunks for buffer in _buffers_of(chunk))
    cells: list[Any] = column.to_pylist()
    return cells


def _buffers_of(chunk: pa.Array) -> Iterator[pa.Buffer | None]:
    """Yield the cells of an array of large_binary as views. A scalar of Arrow would be a copy."""
    _, ends, content = chunk.buffers()
    offsets = np.frombuffer(ends, np.int64)[chunk.offset :].tolist() if len(chunk) else []
    is_valid = chunk.is_valid().to_pylist() if chunk.null_count else [True] * len(chunk)
    for present, (start, end) in zip(is_valid, pairwise(offsets), strict=False):  # there may be later offsets
        yield (content.slice(start, end - start) if end > start else pa.py_buffer(b"")) if present else None


def is_known(dtype: str) -> bool:
    """Return whether tensors of this dtype can be converted to arrays."""
    try:
        _from_bytes(b"", dtype)
    except TypeError:
        return False
    return True


def _from_bytes(data: Any, dtype: str, length: int = 1) -> _Array:
    """Return the elements in some bytes. `length`: of the last dimension, whose rows have a scale each in `int8_scaled`."""
    if dtype == SCALED:
        rows = np.frombuffer(data, [("scale", "<f4"), ("codes", np.int8, (length,))])
        elements: _Array = (rows["codes"] * rows["scale"][:, None]).reshape(-1)
        return elements
    if dtype == "bfloat16":
        return (np.frombuffer(data, np.uint16).astype(np.uint32) << 16).view(np.float32)
    if dtype == "complex32":
        return np.frombuffer(data, np.float16).astype(np.float32).view(np.complex64)
    if dtype.startswith("float8_"):
        import torch  # imported here, because other types do not need it

        if (float8 := getattr(torch, dtype, None)) is not None:
            return torch.from_numpy(np.frombuffer(data, np.uint8).copy()).view(float8).float().numpy()
    array = np.frombuffer(data, np.dtype(dtype))
    array.flags.writeable = False  # a view of mapped memory, which later readers would see changed
    return array
