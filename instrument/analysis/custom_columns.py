"""Custom statistics and metrics as columns. The files contain them in one column, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from ..spec.record import names_of_custom_statistics
from ..spec.statistics import REMAINDERS
from ..spec.tables import CUSTOM
from .run_files import RunFiles


def custom_statistics_of(infos: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of the custom statistics of some runs, each once.

    Args:
        infos: The content of run.json of each run.
    """
    configs = (info.get("config") for info in infos)
    hooks = (config.get("hooks") for config in configs if isinstance(config, Mapping))
    return tuple(dict.fromkeys(name for each in hooks for name in names_of_custom_statistics(each)))


def custom_metrics_of(files: RunFiles) -> list[str]:
    """Return the names of the custom metrics of a run, in the order of their first values."""
    return custom_metrics_in(batch.column(0) for batch in files.scan("metrics", [CUSTOM.name]))


def custom_metrics_in(parts: Iterable[pa.Array]) -> list[str]:
    """Return the names in the column that contains the custom metrics, in the order of their first values."""
    names: dict[str, None] = {}
    for cells in parts:
        if cells.null_count < len(cells):
            names |= dict.fromkeys(pc.unique(cells.drop_null().keys).to_pylist())
    return list(names)


def column_names(columns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the columns of a table with the custom ones in place of the column that contains them."""
    return [name for column in columns for name in (names if column == CUSTOM.name else [column])]


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
    """Replace the extremes that float64 rounds by exact integers, in place. Such a column then has the dtype object.

    Args:
        frame: Rows of `stats`.
        rows: The same rows as they are stored, with the remainders among the custom statistics.
    """
    index = rows.schema.get_field_index(CUSTOM.name)
    if index < 0 or rows.column(index).null_count == len(rows):
        return
    for name, remainder in REMAINDERS.items():
        rests = pc.map_lookup(rows.column(index), pa.scalar(remainder), "first").to_pylist()
        if any(rests):
            values = zip(frame[name].tolist(), rests, strict=True)
            exact = [value if rest is None else int(value) + int(rest) for value, rest in values]
            frame[name] = pd.Series(exact, index=frame.index, dtype=object)
