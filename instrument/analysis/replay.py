"""Replay of the rows of a run to a sink, ordered by step."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import itemgetter

import pyarrow.compute as pc
import pyarrow.dataset as ds

from ..storage.parts import journals_of, part_files
from ..storage.run_files import RunFiles
from ..tables.schemas import TABLES
from ..tables.sink_interface import Row, Sink

BATCH_ROWS = 4_096  # that are converted to Python objects together
Entry = tuple[int, str, Row]
"""A step, the name of a table, and a row of this table."""


def replay(
    files: RunFiles, sink: Sink, *, tables: Sequence[str], since: int | None = None, rank: int | None = None
) -> None:
    """Write the rows of some tables to a sink, step by step. Except for metrics and events, a few batches are in memory at a time.

    Args:
        sink: The sink. It is not closed.
        tables: The names of the tables. `tensors` is not supported, because no sink of a replay writes tensors.
    """
    streams = []
    for table in tables:
        parts = [*part_files(files.folder, table), *(part for _, part in journals_of(files.folder, table))]
        every = sorted({part.rank for part in parts})
        ranks = [rank] if rank is not None or len(every) < 2 else every
        streams += [_entries(files, table, each, since) for each in ranks]
    for _, entries in groupby(heapq.merge(*streams, key=itemgetter(0)), itemgetter(0)):
        for _, table, row in entries:
            sink.write(table, [row])
        sink.end_step()


def _entries(files: RunFiles, table: str, rank: int | None, since: int | None) -> Iterator[Entry]:
    tests = [ds.field("rank") == rank] if rank is not None else []
    tests += [ds.field("step") >= since] if since is not None else []
    names, condition = TABLES[table].names, tests[0] & tests[-1] if tests else None
    # Rows of evaluations may precede a step's rows, which are copied from the GPU later.
    if table in ("metrics", "events"):
        unsorted = files.read(table, names, condition)
        batches = unsorted.take(pc.sort_indices(unsorted["step"].fill_null(0))).to_batches(BATCH_ROWS)
    else:
        batches = files.scan(table, names, condition)
    for batch in batches:
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True):
            yield row[0] or 0, table, row
