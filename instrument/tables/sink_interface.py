"""The interface between a probe and the sinks that store its rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Row = tuple[Any, ...]
"""One row, in the order of the columns of its table."""


class EventWriter(Protocol):
    """Writes an event: `Probe.event`."""

    def __call__(
        self, rule: str, message: str, *, severity: str = ..., layer: str | None = ..., step: int | None = ...
    ) -> None: ...


class Sink(Protocol):
    """Stores rows. `instrument.storage.memory.MemorySink` is the reference implementation."""

    def write(self, table: str, rows: Sequence[Row]) -> None:
        """Store rows of a table of `instrument.tables.schemas`, except `tensors`."""

    def keep(
        self, key: Row, source_shape: Sequence[int], tensor: Tensor, dtype: torch.dtype | None = None
    ) -> int | None:
        """Store a copy of a tensor.

        It is copied before this returns, since the tensor may be modified in place afterwards.

        Args:
            key: The identity columns.
            source_shape: The shape of the complete tensor in the model.
            tensor: The tensor, or the recorded part of it; strided.
            dtype: The dtype in which the values are stored; None leaves it to the sink, which keeps every value that float32 represents.
                Not int8 for floating-point values: a custom sink gets these rounded to 8 bits, as float32.

        Returns:
            The size of the stored values in bytes; None if the tensor was dropped, because no memory was available.
        """

    def end_step(self) -> None:
        """End a step: all of its rows were passed, and must survive the end of the process from now on.

        Tensors of the next step may have been passed already, with copies that a GPU has not completed. The sink does not
        wait for these.
        """

    def close(self) -> None:
        """End the recording: no more rows will come, and all rows must be readable from now on."""
