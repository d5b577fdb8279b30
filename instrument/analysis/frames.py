"""Rows of a run as a DataFrame: with plain labels, with tensors as arrays, and with what the run was started with."""

from __future__ import annotations

import pandas as pd
import pyarrow as pa

from .arrays import array_of, is_known
from .files import RunFiles


def plain_labels(table: pa.Table) -> pa.Table:
    """Dictionary columns as plain strings: what pandas users compare, group and concatenate without surprises."""
    for i, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(i, field.name, table.column(i).cast(pa.string()))
    return table


def without_unknown_types(frame: pd.DataFrame, files: RunFiles) -> pd.DataFrame:
    """Rows of tensors without those of types that NumPy does not have, which are named among the problems of the files."""
    known = frame["dtype"].map(is_known).astype(bool)
    for dtype in frame["dtype"][~known].unique():
        files.note_left_out("tensors", f"NumPy has no type {dtype}")
    return frame if known.all() else frame[known].reset_index(drop=True)


def with_arrays(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of tensors with an array in each, and with their shapes as tuples."""
    cells = zip(frame["values"], frame["data"], frame["shape"], frame["dtype"], strict=True)
    return frame.assign(
        values=pd.Series([array_of(*cell) for cell in cells], dtype=object),
        shape=pd.Series([tuple(shape) for shape in frame["shape"]], dtype=object),
        source_shape=pd.Series([tuple(shape) for shape in frame["source_shape"]], dtype=object),
    ).drop(columns="data")


def add_overrides(frame: pd.DataFrame, run: str, overrides: pd.DataFrame, place: int) -> None:
    """The run's folder, seed and overrides as columns; one that is named like a column of the table becomes `override.<name>`.

    Args:
        frame: Rows of the run.
        run: Its folder.
        overrides: Those of all runs, so that a column has one type in all of them.
        place: Of the run among them.
    """
    frame.insert(0, "run", run)
    for key, values in overrides.items():
        name = f"override.{key}" if key in frame.columns else key
        frame[name] = values.iloc[[place] * len(frame)].set_axis(frame.index)
