"""Replay of the rows of a run to a sink, ordered by step."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import count, groupby
from operator import itemgetter

import pyarrow.dataset as ds

from ..storage.parts import journals_of, part_files
from ..storage.run_files import RunFiles
from ..tables.schemas import TABLES
from ..tables.sink_interface import Row, Sink

MAX_DISPLACEMENT = 64
"""Maximum displacement of a row: evaluation rows may precede a step's rows, which are copied from the GPU later."""

Entry = tuple[int, str, Row]
"""A step, the name of a table, and a row of this table."""


def replay(
    files: RunFiles, sink: Sink, *, tables: Sequence[str], since: int | None = None, rank: int | None = None
) -> None:
    """Write the rows of some tables to a sink, step by step; only a few batches are in memory at a time.

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
    rows = (
        (row[0] or 0, table, row)
        for batch in files.scan(table, TABLES[table].names, tests[0] & tests[-1] if tests else None)
        for row in zip(*(column.to_pylist() for column in batch.columns), strict=True)
    )
    return _sorted_nearly(rows) if table in ("metrics", "events") else rows


def _sorted_nearly(entries: Iterable[Entry]) -> Iterator[Entry]:
    """Sort entries by step, keeping their order within a step; entries are displaced by at most `MAX_DISPLACEMENT`."""
    heap: list[tuple[int, int, Entry]] = []
    numbers = count()
    for entry in entries:
        heapq.heappush(heap, (entry[0], next(numbers), entry))
        if len(heap) > MAX_DISPLACEMENT:
            yield heapq.heappop(heap)[2]
    while heap:
        yield heapq.heappop(heap)[2]
