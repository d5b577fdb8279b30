"""Rows to several places: one that counts, and others that may fail."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from ..capture.ranks import own_rank
from ..capture.sink import Row, Sink
from ..capture.tables import TABLES
from ..errors import SinkError
from .parquet import warn


class Several:
    """Hands everything to a first sink, and to others.

    What the first one raises is raised. Another one that raises an error is told of once, as a warning and an event, is
    closed, and gets nothing more: it costs the first one no row, and the run goes on.

    Args:
        first: The one that counts; what it says of a tensor is what `keep` gives.
        others: By the names that messages tell them by; those that are added later get what comes later.
        tell: Called with what is wrong with one of the others.
    """

    def __init__(self, first: Sink, others: Mapping[str, Sink], *, tell: Callable[[str], None] = warn) -> None:
        self.first = first
        self.others: dict[str, Sink] = dict(others)
        self.tell = tell
        self._step: int | None = None

    def write(self, table: str, rows: Sequence[Row]) -> None:
        """Hand on rows."""
        self.first.write(table, rows)
        if rows and TABLES[table].names[0] == "step":
            self._step = rows[-1][0]
        self._each(lambda sink: sink.write(table, rows))

    def keep(
        self, key: Row, source_shape: Sequence[int], tensor: Tensor, dtype: torch.dtype | None = None
    ) -> int | None:
        """Hand on a tensor; one that the first has no room for goes nowhere."""
        stored = self.first.keep(key, source_shape, tensor, dtype)
        if stored is not None:
            self._step = key[0]
            self._each(lambda sink: sink.keep(key, source_shape, tensor, dtype))
        return stored

    def end_step(self) -> None:
        """The step is over for all of them."""
        self.first.end_step()
        self._each(lambda sink: sink.end_step())

    def close(self) -> None:
        """Close all of them, the first one last, and raise the first error that is to be raised."""
        errors: list[BaseException] = []
        for name, sink in list(self.others.items()):
            try:
                sink.close()
            except Exception as error:
                self._leave_out(name, error)
            except BaseException as error:
                errors.append(error)
        try:
            self.first.close()
        except BaseException as error:
            errors.append(error)
        if errors:
            raise errors[0]

    def _each(self, call: Callable[[Sink], object]) -> None:
        for name, sink in list(self.others.items()):
            try:
                call(sink)
            except Exception as error:
                self._leave_out(name, error)
                with suppress(Exception):  # it was told that it fails
                    sink.close()

    def _leave_out(self, name: str, error: Exception) -> None:
        del self.others[name]
        failed = str(error) if isinstance(error, SinkError) else f"{name} failed: {type(error).__name__}: {error}"
        message = f"{failed}; nothing more goes to {name}, and the run goes on: Parquet has every row"
        self.tell(message)
        self.write("events", [(self._step, own_rank(), None, "tracking", message, "warning")])
