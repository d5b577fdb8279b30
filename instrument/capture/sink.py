"""The seam between a probe and whoever keeps its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

Row = tuple[Any, ...]
"""One row of a table, in the order of its columns. Values of the tensors table are CPU tensors."""


class Sink(Protocol):
    """Keeps rows. `instrument.sinks.memory.MemorySink` is the one to test against."""

    def write(self, table: str, rows: Sequence[Row]) -> None:
        """Take rows of one of the tables of `instrument.capture.tables`."""

    def end_step(self) -> None:
        """A step is over: its rows have all been written."""

    def close(self) -> None:
        """No more rows will come; what was written is to be readable from now on."""
