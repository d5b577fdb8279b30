"""Rows kept in memory: for tests, notebooks, and runs too short to be written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..capture.sink import Row
from ..capture.tables import TABLES

if TYPE_CHECKING:
    import pandas as pd


class MemorySink:
    """Keeps every row, in the order in which it came."""

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = {name: [] for name in TABLES}
        self.steps = 0
        self.closed = False

    def write(self, table: str, rows: Sequence[Row]) -> None:
        """Keep the rows."""
        self.rows[table].extend(rows)

    def keep(
        self, key: Row, source_shape: Sequence[int], tensor: Tensor, dtype: torch.dtype | None = None
    ) -> int | None:
        """Keep a copy of a tensor, on the CPU."""
        copied = tensor.to("cpu", dtype or tensor.dtype, copy=True, memory_format=torch.contiguous_format)
        name = str(copied.dtype).removeprefix("torch.")
        self.rows["tensors"].append((*key, name, list(copied.shape), list(source_shape), copied, None))
        return copied.nbytes

    def end_step(self) -> None:
        """Count the step."""
        self.steps += 1

    def close(self) -> None:
        """Nothing to be done; it is noted for tests."""
        self.closed = True

    def records(self, table: str) -> list[dict[str, Any]]:
        """The rows of a table as mappings from the columns' names."""
        return [dict(zip(TABLES[table].names, row, strict=True)) for row in self.rows[table]]

    def frame(self, table: str) -> pd.DataFrame:
        """The rows of a table as a DataFrame with all of its columns."""
        import pandas as pd

        return pd.DataFrame(self.rows[table], columns=list(TABLES[table].names))
