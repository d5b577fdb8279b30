"""Values of a configuration as columns with the types that they have."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

LARGEST = 2**63  # what a column of integers has no room for


def typed(values: Sequence[Any]) -> pd.Series:
    """A column: integers, floats (integers among them too), booleans or strings, where all are; else whatever they are.

    A null does not make floats of integers, nor objects of booleans: they are pandas' Int64 and boolean then.
    """
    known = [value for value in values if value is not None]
    kinds = {_kind(value) for value in known}
    if kinds == {"integer"}:
        return pd.Series(list(values), dtype="int64" if len(known) == len(values) else "Int64")
    if kinds == {"boolean"}:
        return pd.Series(list(values), dtype="bool" if len(known) == len(values) else "boolean")
    if kinds <= {"integer", "float"}:
        return pd.Series(list(values), dtype="float64")
    return pd.Series(list(values), dtype="str" if kinds == {"string"} else "object")


def typed_frame(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Rows as a table, each column with its type.

    What a row does not have is null; of objects it is NaN, unlike a null that the row has, which is None.
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
