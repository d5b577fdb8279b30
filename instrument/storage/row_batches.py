"""Rows as Arrow record batches: those of the journal, and those of the files."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from ..tables.schemas import POSITION, Table


def as_batch(table: Table, *groups: Sequence[tuple[Any, ...]]) -> pa.RecordBatch:
    """Convert rows, tuples in the order of the columns, to a record batch with labels as strings.

    A group of rows that has a method `to_batch` converts itself.
    """
    batches = [
        group.to_batch()
        if hasattr(group, "to_batch")
        else pa.RecordBatch.from_struct_array(pa.array(group, table.plain_struct))
        for group in groups
    ]
    if len(batches) == 1:
        return batches[0]
    (batch,) = pa.Table.from_batches(batches).combine_chunks().to_batches()
    return batch


def with_positions(table: Table, batch: pa.RecordBatch, rows: int | None = None) -> pa.RecordBatch:
    """Add the position of each row within a batch, or within each of several batches of `rows` rows, if the files have it."""
    if not table.is_sorted:
        return batch
    positions = pa.array(np.arange(batch.num_rows, dtype=np.int32) % (rows or batch.num_rows or 1))
    return batch.append_column(pa.field(POSITION.name, POSITION.type), positions)


def joined(batches: Sequence[pa.RecordBatch]) -> pa.Table:
    """Return batches as one table. Columns that some of them lack are null there."""
    groups = groupby(batches, attrgetter("schema"))
    return pa.concat_tables([pa.Table.from_batches([*group]) for _, group in groups], promote_options="default")


def as_table(table: Table, plain: Sequence[pa.RecordBatch] | pa.Table) -> pa.Table:
    """Convert plain rows, in batches or with their positions, to the dtypes of the files, with labels as dictionaries.

    Columns that they lack are null.
    """
    if not isinstance(plain, pa.Table):
        empty = pa.RecordBatch.from_pylist([], table.plain_schema)
        plain = joined([with_positions(table, batch) for batch in [*plain, empty]])
    columns = []
    for column in table.stored:
        is_known = column.name in plain.schema.names
        cells = (
            plain[column.name]
            if is_known
            else pa.chunked_array([pa.nulls(plain.num_rows, table.plain_schema.field(column.name).type)])
        )
        columns.append(cells.combine_chunks().dictionary_encode() if pa.types.is_dictionary(column.type) else cells)
    return pa.Table.from_arrays(columns, schema=table.schema)
