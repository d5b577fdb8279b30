"""Custom sinks: any object with the methods of `instrument.Sink`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, Problem, SinkError, user_code_location
from ..tables.sink_interface import Row, Sink

if TYPE_CHECKING:
    import torch
    from torch import Tensor

METHODS = ("write", "keep", "end_step", "close")


class CustomSink:
    """Passes everything to a custom sink. After an exception of the sink, only `close` is called.

    Raises:
        ConfigError: It is a class, or lacks a method of `instrument.Sink`.
        SinkError: From all methods: the custom sink raised an exception, or returned an invalid value.
    """

    def __init__(self, sink: Any, where: str) -> None:
        self.name = type(sink).__qualname__
        if isinstance(sink, type):
            message = "a sink must be an instance, but this is a class"
            raise ConfigError(Problem(where, message, given=sink.__qualname__, fix=f"pass {sink.__qualname__}(...)"))
        if missing := [name for name in METHODS if not callable(getattr(sink, name, None))]:
            message = f"a sink requires the methods {', '.join(METHODS)}; {self.name} has no {' and no '.join(missing)}"
            raise ConfigError(Problem(where, message, given=self.name))
        self._sink: Sink = sink
        self._has_failed = False

    def write(self, table: str, rows: Sequence[Row]) -> None:
        self._call("write", table, rows)

    def keep(
        self, key: Row, source_shape: Sequence[int], tensor: Tensor, dtype: torch.dtype | None = None
    ) -> int | None:
        from ..values.int8_rows import rounded  # imported late, like torch

        stored: int | None = self._call("keep", key, source_shape, *rounded(tensor, dtype))
        return stored

    def end_step(self) -> None:
        self._call("end_step")

    def close(self) -> None:
        """Close the sink, also after an exception."""
        if self._has_failed:
            with suppress(Exception):  # its failure is reported already
                self._sink.close()
        else:
            self._call("close")

    def _call(self, method: str, *arguments: Any) -> Any:
        if self._has_failed:
            return None
        try:
            result = getattr(self._sink, method)(*arguments)
            if method == "keep" and not (result is None or isinstance(result, int)):
                kind = type(result).__name__
                raise TypeError(f"must return the size in bytes, or None for a dropped tensor, but returned {kind}")
            return result
        except Exception as error:
            self._has_failed = True
            location = user_code_location(error)
            raise SinkError(f"{self.name}.{method} failed: {type(error).__name__}: {error}{location}") from error
