"""Conversion of configuration values to typed columns."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

LARGEST = 2**63  # the smallest positive integer that does not fit into int64


def typed(values: Sequence[Any]) -> pd.Series:
    """Return values as a column of integers, floats, booleans or strings if all are of this type, otherwise of objects.

    Integers among floats are converted to floats. Columns with nulls use the pandas types Int64 and boolean, so that
    nulls do not change the type.
    """
    present = [value for value in values if value is not None]
    kinds = {_kind(value) for value in present}
    if kinds == {"integer"}:
        return pd.Series(list(values), dtype="int64" if len(present) == len(values) else "Int64")
    if kinds == {"boolean"}:
        return pd.Series(list(values), dtype="bool" if len(present) == len(values) else "boolean")
    if kinds <= {"integer", "float"}:
        return pd.Series(list(values), dtype="float64")
    return pd.Series(list(values), dtype="str" if kinds == {"string"} else "object")


def typed_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return rows as a DataFrame with typed columns.

    Keys that a row lacks are null. In object columns a missing key is NaN, and a null value is None.
    """
    names: Iterable[str] = dict.fromkeys(name for row in rows for name in row)
    return pd.DataFrame({name: _column(rows, name) for name in names}, index=range(len(rows)))


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> pd.Series:
    column = typed([row.get(name) for row in rows])
    if column.dtype == object:
        return pd.Series([row.get(name, math.nan) for row in rows], dtype=object)
    return column


def _kind(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "integer" if -LARGEST <= value < LARGEST else "other"
    return {float: "float", str: "string"}.get(type(value), "other")
