"""A run's rows once more, in the order of the steps, as a sink was given them."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, groupby
from operator import itemgetter
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds

from ..capture.sink import Row, Sink
from ..capture.tables import TABLES
from ..sinks.parts import journals_of, parts_of
from .arrays import array_of
from .files import RunFiles

ASTRAY = (
    64  # rows by which one may come before rows of earlier steps: an evaluation's, where a step's is late from a GPU
)

Entry = tuple[int, str, Row]
"""A row with its step and its table."""


def replay(
    files: RunFiles, sink: Sink, *, tables: Sequence[str], since: int | None = None, rank: int | None = None
) -> None:
    """Give a sink the rows of some tables, step by step; no more than a few batches of them are in memory.

    Args:
        files: The run's.
        sink: It is not closed.
        tables: Which rows; those of a table that have steps.
        since: The first step; all without it.
        rank: Which of several processes' rows; all of them without it.
    """
    streams = [
        _entries(files, table, one, since)
        for table in tables
        for one in (_ranks(files, table) if rank is None else [rank])
    ]
    for _, entries in groupby(heapq.merge(*streams, key=itemgetter(0)), itemgetter(0)):
        for _, table, row in entries:
            if table == "tensors":
                _keep(files, sink, row)
            else:
                sink.write(table, [row])
        sink.end_step()


def _keep(files: RunFiles, sink: Sink, row: Row) -> None:
    import torch  # what reads tables does not need it

    *key, dtype, shape, source_shape, values, data = row
    try:
        array = array_of(values, data, shape, dtype)
    except TypeError:
        files.note_left_out("tensors", f"NumPy has no type {dtype}")
        return
    sink.keep(tuple(key), source_shape, torch.from_numpy(array.copy()))


def _ranks(files: RunFiles, table: str) -> list[int | None]:
    """The processes that wrote rows; one None stands for all where there was only one."""
    parts = [*parts_of(files.folder, table), *(part for _, part in journals_of(files.folder, table))]
    ranks = sorted({part.rank for part in parts})
    return [*ranks] if len(ranks) > 1 else [None]


def _entries(files: RunFiles, table: str, rank: int | None, since: int | None) -> Iterator[Entry]:
    tests = [ds.field("rank") == rank] if rank is not None else []
    tests += [ds.field("step") >= since] if since is not None else []
    condition = tests[0] & tests[-1] if tests else None
    rows = (
        (row[0] or 0, table, row)
        for batch in files.scan(table, TABLES[table].names, condition)
        for row in rows_of(batch)
    )
    return _sorted_nearly(rows) if table in ("metrics", "events") else rows


def _sorted_nearly(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Entries by their steps, and in their own order within a step, where none is further astray than `ASTRAY`."""
    heap: list[tuple[int, int, Entry]] = []
    numbers = count()
    for entry in entries:
        heapq.heappush(heap, (entry[0], next(numbers), entry))
        if len(heap) > ASTRAY:
            yield heapq.heappop(heap)[2]
    while heap:
        yield heapq.heappop(heap)[2]


def rows_of(batch: pa.RecordBatch) -> Iterator[Row]:
    """Rows as tuples; of recorded tensors the elements as arrays and buffers that are views of the batch."""
    columns = [_cells(name, batch.column(name)) for name in batch.schema.names]
    return zip(*columns, strict=True)


def _cells(name: str, column: pa.Array) -> Iterable[Any]:
    if name == "values":
        return (None if not cell.is_valid else cell.values.to_numpy(zero_copy_only=False) for cell in column)
    if name == "data":
        return (None if not cell.is_valid else cell.as_buffer() for cell in column)
    cells: list[Any] = column.to_pylist()
    return cells
