"""Custom statistics as columns. The files contain them in one column, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from ..capture.tables import CUSTOM
from ..spec.record import names_of_custom_statistics


def custom_statistics_of(infos: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of the custom statistics of some runs, each once.

    Args:
        infos: The content of run.json of each run.
    """
    configs = (info.get("config") for info in infos)
    hooks = (config.get("hooks") for config in configs if isinstance(config, Mapping))
    return tuple(dict.fromkeys(name for each in hooks for name in names_of_custom_statistics(each)))


def column_names(columns: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return the columns of a table with the custom statistics in place of the column that contains them."""
    return [name for column in columns for name in (names if column == CUSTOM.name else [column])]


def with_custom_columns(rows: pa.Table, names: Sequence[str]) -> pa.Table:
    """Replace the column that contains the custom statistics, if there is one, by one column per name."""
    index = rows.schema.get_field_index(CUSTOM.name)
    if index < 0:
        return rows
    cells = rows.column(index)
    rows = rows.remove_column(index)
    for i, name in enumerate(names):
        rows = rows.add_column(index + i, name, pc.map_lookup(cells, pa.scalar(name), "first"))
    return rows
