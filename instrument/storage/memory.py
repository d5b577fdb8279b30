"""A sink that keeps rows in memory, for tests, notebooks and short runs."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..stats.device_copy import HostCopy
from ..tables.schemas import CUSTOM, SHAPE, TABLES
from ..tables.sink_interface import Row
from ..values.int8_rows import rounded
from .blocks import NO_PLACE

if TYPE_CHECKING:
    import pandas as pd


class MemorySink:
    """Keeps all rows in memory, in the order in which they were written.

    Attributes:
        rows: The rows of each table, by its name: tuples in the order of the columns.
        steps: The number of completed steps and evaluations.
        closed: Whether the sink was closed.
    """

    def __init__(self) -> None:
        self.rows: dict[str, list[Row]] = {name: [] for name in TABLES}
        self.steps = 0
        self.closed = False
        self._copies: deque[tuple[Row, HostCopy]] = deque()  # tensors, with the columns before the values
        self._appending = threading.Lock()  # hooks of several GPUs run in several threads

    def write(self, table: str, rows: Sequence[Row]) -> None:
        """Append rows to a table.

        Args:
            rows: Tuples in the order of the columns.
        """
        self.rows[table].extend(rows)

    def keep(
        self, key: Row, source_shape: Sequence[int], tensor: Tensor, dtype: torch.dtype | None = None
    ) -> int | None:
        """Append a copy of a tensor to the `tensors` table, on the CPU: if a GPU copies it, when the copy is complete.

        Args:
            key: The identity columns of the row.
            source_shape: The shape of the complete tensor in the model.
            tensor: The tensor, or the recorded part of it.
            dtype: The dtype of the copy. Default: None, which keeps the dtype.

        Returns:
            The size of the copy in bytes.
        """
        tensor, dtype = rounded(tensor, dtype)
        tensor = tensor.to(dtype or tensor.dtype)
        name = str(tensor.dtype).removeprefix("torch.")
        copy = HostCopy(tensor, in_background=True)
        self._copies.append(((*key, name, list(tensor.shape), list(source_shape)), copy))
        self._append_copies()
        return tensor.nbytes

    def _append_copies(self, *, wait: bool = False) -> None:
        with self._appending:
            while self._copies and (wait or self._copies[0][1].is_complete):
                columns, copy = self._copies[0]
                values = copy.wait()
                # Pinned memory is not kept: it cannot be swapped, and is reused for the next copies.
                values = values.clone() if values.is_pinned() else values
                self.rows["tensors"].append((*columns, *NO_PLACE, values, None))
                self._copies.popleft()

    def wait(self) -> None:
        """Append the tensors that a GPU is still copying."""
        self._append_copies(wait=True)

    def end_step(self) -> None:
        """Count the step."""
        self._append_copies()
        self.steps += 1

    def close(self) -> None:
        """Append the last tensors, and mark the sink as closed."""
        self.wait()
        self.closed = True

    def records(self, table: str) -> list[dict[str, Any]]:
        """Return the rows of a table as dictionaries by column name."""
        return [dict(zip(TABLES[table].names, row, strict=True)) for row in self.rows[table]]

    def frame(self, table: str) -> pd.DataFrame:
        """Return the rows of a table as a DataFrame with all columns. Each custom statistic or metric is a column."""
        import pandas as pd

        frame = pd.DataFrame(self.rows[table], columns=list(TABLES[table].names))
        if CUSTOM.name not in frame:
            return frame
        if SHAPE.name in frame:
            shapes = [None if shape is None else tuple(shape) for shape in frame[SHAPE.name]]
            frame[SHAPE.name] = pd.Series(shapes, dtype=object)
        custom = frame.pop(CUSTOM.name)
        names = dict.fromkeys(name for cells in custom.dropna() for name in cells)
        return frame.assign(
            **{name: pd.Series([(cells or {}).get(name) for cells in custom], dtype=float) for name in names}
        )
