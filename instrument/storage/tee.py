"""Sinks around other sinks: one that passes rows to several, of which some may fail, and one around a custom sink."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError, Problem, SinkError, user_code_location
from ..tables.schemas import TABLES
from ..tables.sink_interface import Row, Sink
from ..values.dtensor import own_rank
from ..values.int8_rows import rounded
from .parquet import warn

METHODS = ("write", "keep", "end_step", "close")


class TeeSink:
    """Passes everything to a main sink and to others.

    Exceptions of the main sink and of required sinks propagate. If another sink raises an exception, it is reported once,
    as a warning and an event, closed, and skipped from then on. The run continues, and the main sink loses no row.

    Args:
        first: The main sink. Its `keep` decides whether a tensor is dropped.
        others: Other sinks by the names that messages use. A sink that is added later receives later rows.
        required: The names of those whose exceptions propagate. Default: none.
        report: Called with a message if one of the others fails. Default: issue a warning.
    """

    def __init__(
        self,
        first: Sink,
        others: Mapping[str, Sink],
        *,
        required: Iterable[str] = (),
        report: Callable[[str], None] = warn,
    ) -> None:
        self.first = first
        self.others: dict[str, Sink] = dict(others)
        self.required = set(required)
        self.report = report
        self._step: int | None = None

    def write(self, table: str, rows: Sequence[Row]) -> None:
        self.first.write(table, rows)
        if rows and TABLES[table].names[0] == "step":
            self._step = rows[-1][0]
        self._each(lambda sink: sink.write(table, rows))

    def keep(
        self, key: Row, source_shape: Sequence[int], tensor: Tensor, dtype: torch.dtype | None = None
    ) -> int | None:
        """Pass on a tensor. One that the main sink drops is not passed to the others."""
        stored = self.first.keep(key, source_shape, tensor, dtype)
        if stored is not None:
            self._step = key[0]
            self._each(lambda sink: sink.keep(key, source_shape, tensor, dtype))
        return stored

    def end_step(self) -> None:
        self.first.end_step()
        self._each(lambda sink: sink.end_step())

    def close(self) -> None:
        """Close all sinks, the main sink last, and raise the first exception that propagates."""
        errors: list[BaseException] = []
        for name, sink in [*self.others.items(), (None, self.first)]:
            try:
                sink.close()
            except BaseException as error:
                if isinstance(error, Exception) and name is not None and name not in self.required:
                    self._drop_sink(name, error)
                else:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _each(self, call: Callable[[Sink], object]) -> None:
        for name, sink in list(self.others.items()):
            try:
                call(sink)
            except Exception as error:
                if name in self.required:
                    raise
                self._drop_sink(name, error)
                with suppress(Exception):  # its failure is reported already
                    sink.close()

    def _drop_sink(self, name: str, error: Exception) -> None:
        del self.others[name]
        failed = str(error) if isinstance(error, SinkError) else f"{name} failed: {type(error).__name__}: {error}"
        message = f"{failed}; {name} receives no more data, the run continues, and Parquet has every row"
        self.report(message)
        self.write("events", [(self._step, own_rank(), None, "tracking", message, "warning", None, None, None)])


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
