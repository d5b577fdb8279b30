"""The seam between a probe and whoever keeps its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Row = tuple[Any, ...]
"""One row, in the order of the columns of its table."""


class Sink(Protocol):
    """Keeps rows. `instrument.sinks.memory.MemorySink` is the one to test against."""

    def write(self, table: str, rows: Sequence[Row]) -> None:
        """Take rows of one of the tables of `instrument.capture.tables`, all but `tensors`."""

    def keep(
        self, key: Row, source_shape: Sequence[int], tensor: Tensor, dtype: torch.dtype | None = None
    ) -> int | None:
        """Take a copy of a tensor, here and now: it may be written to in place as soon as this returns.

        Args:
            key: The columns of identity.
            source_shape: The shape of the tensor in the model, of which this one may be a part.
            tensor: What is kept; strided.
            dtype: The type to keep it in; its own without it.

        Returns:
            The bytes that its values take; None where there was no room, and the tensor was dropped.
        """

    def end_step(self) -> None:
        """A step is over: its rows have all been given, and are kept from now on whatever becomes of the process."""

    def close(self) -> None:
        """No more rows will come; what was written is to be readable from now on."""
