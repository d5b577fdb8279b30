"""Custom statistics as columns. The files contain them in one column, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from ..capture.tables import CUSTOM
from ..spec.record import CustomStatistic


def names_of_custom_statistics(infos: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the names of the custom statistics of some runs, each once.

    Args:
        infos: The content of run.json of each run.
    """
    return tuple(dict.fromkeys(name for info in infos for name in _names_in(info)))


def _names_in(info: Mapping[str, Any]) -> Iterator[str]:
    config = info.get("config")
    hooks = config.get("hooks") if isinstance(config, Mapping) else None
    specs = hooks.values() if isinstance(hooks, Mapping) else hooks if isinstance(hooks, list) else ()
    for spec in specs:
        stats = spec.get("stats") if isinstance(spec, Mapping) and spec.get("action") == "record" else None
        for item in stats if isinstance(stats, list) else [stats]:
            if isinstance(item, Mapping):
                try:
                    yield CustomStatistic.model_validate(item).column
                except ValidationError:  # run.json was edited
                    continue


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
