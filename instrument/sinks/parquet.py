"""Rows as Parquet: one folder a table, in it one file for each time that rows were flushed.

A file is written outside the folder of its table and moved there when it is whole, so that whoever reads the folder
meets whole files only.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from ..capture.recorder import RANK
from ..capture.sink import Row
from ..capture.tables import TABLES, Table, as_arrow

MAX_ROWS = 100_000  # held back at most, of one table
MAX_BYTES = 64 * 2**20  # of recorded values held back at most
ROW_GROUP_BYTES = 32 * 2**20  # of recorded values in one row group

# What float32 holds to the bit; everything else is kept as bytes.
_FITS_FLOAT32 = (torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16)


class ParquetSink:
    """Writes rows below a run's folder.

    Args:
        folder: The run's folder; it has to exist.
        tensors: `list` keeps values as `list<float>`, which every Parquet reader knows; `bytes` keeps raw bytes,
            which are several times faster. Types that float32 cannot hold to the bit are kept as bytes either way.
        flush_seconds: Rows are written at least this often, when a step ends.
    """

    def __init__(
        self, folder: Path, *, tensors: Literal["list", "bytes"] = "list", flush_seconds: float = 10.0
    ) -> None:
        self.folder = folder
        self.tensors = tensors
        self.flush_seconds = flush_seconds
        self._rows: dict[str, list[Row]] = {name: [] for name in TABLES}
        self._parts = dict.fromkeys(TABLES, 0)
        self._bytes = 0
        self._flushed = time.monotonic()

    def write(self, table: str, rows: Sequence[Row]) -> None:
        """Hold rows back until the next flush."""
        self._rows[table].extend(rows)
        if table == "tensors":
            at = TABLES["tensors"].names.index("values")
            self._bytes += sum(row[at].numel() * row[at].element_size() for row in rows)

    def end_step(self) -> None:
        """Flush where it is time, or where too much is held back."""
        late = time.monotonic() - self._flushed >= self.flush_seconds
        if late or self._bytes >= MAX_BYTES or any(len(rows) >= MAX_ROWS for rows in self._rows.values()):
            self.flush()

    def flush(self) -> None:
        """Write all that is held back."""
        for name, rows in self._rows.items():
            if rows:
                self._write_part(TABLES[name], rows)
                self._rows[name] = []
        self._bytes = 0
        self._flushed = time.monotonic()

    def close(self) -> None:
        """Flush, and give every table that had no rows an empty file, so that each can be read."""
        self.flush()
        for name, parts in self._parts.items():
            if not parts:
                self._write_part(TABLES[name], [])

    def _write_part(self, table: Table, rows: list[Row]) -> None:
        folder = self.folder / table.name
        folder.mkdir(exist_ok=True)
        name = f"part-{RANK:04d}-{self._parts[table.name]:06d}.parquet"
        aside = self.folder / f".{table.name}-{name}.tmp"  # polars reads all that is in a table's folder
        labels = [column.name for column in table.columns if pa.types.is_dictionary(column.type)]
        options: dict[str, Any] = {"use_dictionary": labels, "compression": "zstd", "compression_level": 1}
        if table.name == "tensors":
            rows = [self._encoded(row) for row in rows]
            # Dictionaries and statistics of values cost more than the values: they are for labels only.
            options |= {"compression": "none", "compression_level": None, "write_statistics": ["step", *labels]}
        content = as_arrow(table, rows)
        per_group = max(1, ROW_GROUP_BYTES * len(rows) // max(1, content.nbytes)) if rows else None
        pq.write_table(content, aside, row_group_size=per_group if table.name == "tensors" else None, **options)
        os.replace(aside, folder / name)
        self._parts[table.name] += 1

    def _encoded(self, row: Row) -> Row:
        """A row of the tensors table with its tensor as a list of numbers, or as bytes."""
        *rest, tensor, _ = row
        if self.tensors == "list" and tensor.dtype in _FITS_FLOAT32:
            return (*rest, tensor.to(torch.float32).reshape(-1).numpy(), None)
        return (*rest, None, _raw(tensor))


def _raw(tensor: Tensor) -> bytes:
    """The elements of a CPU tensor as bytes, in C order; bfloat16, which NumPy does not know, as its 16 bits."""
    flat = tensor.contiguous().reshape(-1)
    if flat.dtype == torch.bfloat16:
        flat = flat.view(torch.int16)
    array: np.ndarray[Any, Any] = flat.numpy()
    return array.tobytes()
