"""Rows of a run as a DataFrame: with plain labels, and with what the run was started with."""

from __future__ import annotations

import pandas as pd
import pyarrow as pa


def plain_labels(table: pa.Table) -> pa.Table:
    """Dictionary columns as plain strings: what pandas users compare, group and concatenate without surprises."""
    for i, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(i, field.name, table.column(i).cast(pa.string()))
    return table


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
