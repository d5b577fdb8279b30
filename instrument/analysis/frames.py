"""Conversion of rows to DataFrames: plain labels, tensors as arrays, and columns for overrides."""

from __future__ import annotations

import pandas as pd
import pyarrow as pa

from .run_files import RunFiles
from .tensor_decoding import array_of, is_known


def plain_labels(table: pa.Table) -> pa.Table:
    """Convert dictionary columns to plain strings, which pandas compares, groups and concatenates as expected."""
    for i, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(i, field.name, table.column(i).cast(pa.string()))
    return table


def without_unknown_types(frame: pd.DataFrame, files: RunFiles) -> pd.DataFrame:
    """Remove tensors of dtypes that NumPy does not support, and add the dtypes to the problems of the files."""
    is_supported = frame["dtype"].map(is_known).astype(bool)
    for dtype in frame["dtype"][~is_supported].unique():
        files.report_skipped("tensors", f"NumPy does not support {dtype}")
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
    """Add the folder, seed and overrides of a run as columns, in place.

    An override with the name of a column of the table becomes `override.<name>`.

    Args:
        frame: Rows of the run.
        run: Folder of the run.
        overrides: Overrides of all runs, so that a column has the same type in all of them.
        index: Index of the run in `overrides`.
    """
    frame.insert(0, "run", run)
    for key, values in overrides.items():
        name = f"override.{key}" if key in frame.columns else key
        frame[name] = values.iloc[[index] * len(frame)].set_axis(frame.index)
