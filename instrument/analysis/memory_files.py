"""The rows of a probe that keeps them in memory, read in the same way as the files of a run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import torch

from ..storage.memory import MemorySink
from ..storage.row_batches import as_batch, as_table
from ..storage.run_files import RunFiles
from ..storage.tensors import rows_of
from ..tables.schemas import POSITION, TABLES, Table
from ..tables.sink_interface import Row
from .run_tables import IN_MEMORY

T = TypeVar("T")


class MemoryFiles(RunFiles):
    """The rows of a `MemorySink` as Arrow tables. New rows are converted when a table is read."""

    def __init__(self, sink: MemorySink, info: Callable[[], dict[str, Any]]) -> None:
        super().__init__(IN_MEMORY)
        self.sink = sink
        self._info = info
        self._pieces: dict[str, list[pa.Table]] = {name: [] for name in TABLES}

    def info(self) -> dict[str, Any]:
        """Return the content that run.json would have."""
        return self._info()

    def table_files(self, name: str) -> tuple[list[Path], list[pa.Table]]:
        """Return no Parquet files, and the rows of a table."""
        if name == "tensors":
            self.sink.wait()
        pieces = self._pieces[name]
        rows, table = self.sink.rows[name][sum(map(len, pieces)) :], TABLES[name]
        if rows and name == "tensors":
            pieces.append(_tensors(rows))
        elif rows:
            plain = pa.Table.from_batches([as_batch(table, rows)])
            if table.is_sorted:
                plain = plain.append_column(POSITION.name, pa.array(_positions(table, rows), POSITION.type))
            pieces.append(as_table(table, plain))
        return [], list(pieces)

    def retry_if_merged(self, operation: Callable[[], T], name: str) -> T:  # noqa: ARG002
        """Call `operation` and return its result."""
        return operation()


def _positions(table: Table, rows: Sequence[Row]) -> np.ndarray[Any, Any]:
    """Return the index of each row among the rows of its step and phase, which follow each other."""
    step, phase = table.names.index("step"), table.names.index("phase")
    moments = [(row[step], row[phase]) for row in rows]
    is_first = np.array([True, *(one != other for one, other in pairwise(moments))])
    index = np.arange(len(rows))
    return index - np.maximum.accumulate(np.where(is_first, index, 0))


def _tensors(rows: Sequence[Row]) -> pa.Table:
    def stored(row: Row) -> tuple[Row, torch.Tensor, bool]:
        *columns, tensor, _ = row
        return tuple(columns), tensor.reshape(-1), tensor.dtype == torch.float32

    return as_table(TABLES["tensors"], rows_of(map(stored, rows)))
