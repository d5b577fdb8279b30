"""Arrow messages that are reused from step to step, since most steps write the same rows with other numbers.

To convert a few rows to Arrow arrays and to serialize them takes much longer than to write them. A template keeps the
message of one step, and replaces the numbers in it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
import pyarrow as pa

from .sink_interface import Row

Numbers = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True, eq=False)
class NumberColumn:
    """A column of numbers or booleans.

    Attributes:
        values: [rows]. Those of nulls are ignored.
        nulls: Which rows have no value, bool [rows]; None if all have one.
    """

    values: Numbers
    nulls: Numbers | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ListColumn:
    """A column of lists of integers.

    Attributes:
        lengths: The number of integers of each row, int64 [rows]; -1 for null.
        values: The integers of all rows, concatenated.
    """

    lengths: Numbers
    values: Numbers


Column: TypeAlias = NumberColumn | ListColumn | pa.Array | tuple[Any, ...]
"""A column of rows: as arrays, or as the cells of all rows."""


class ColumnRows(Sequence[Row]):
    """Rows of a table as columns. They become tuples only if they are read as such."""

    @abstractmethod
    def to_batch(self) -> pa.RecordBatch:
        """Return the rows as a record batch with labels as strings."""

    @cached_property
    def _tuples(self) -> list[Row]:
        cells = (
            [None if cell is None else dict(cell) for cell in column.to_pylist()]
            if pa.types.is_map(column.type)
            else column.to_pylist()
            for column in self.to_batch().columns
        )
        return [*zip(*cells, strict=True)]

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self._tuples[index]


class StepColumns(ColumnRows):
    """Rows that were recorded in one step."""

    @property
    @abstractmethod
    def latest(self) -> tuple[int, str]:
        """Step and phase of the last row."""

    @abstractmethod
    def columns(self) -> list[Column]:
        """Return the columns, for a message."""


class Message(NamedTuple):
    """A serialized record batch, with the part of the interface of `pyarrow.RecordBatch` that a journal needs.

    Attributes:
        num_rows: The number of rows.
        buffer: The bytes. They are only valid until the next message of the same template.
    """

    num_rows: int
    buffer: bytearray

    def serialize(self) -> bytearray:
        """Return the bytes."""
        return self.buffer


class MessageTemplate:
    """The latest message of a table with this schema."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._columns: Sequence[Column] = ()
        self._message = Message(0, bytearray())
        self._numbers: list[Numbers | None] = []  # writable parts of the message

    def message(self, count: int, columns: Sequence[Column]) -> Message:
        """Return the message of rows, given their columns in the order of the schema."""
        parts = zip(columns, self._columns, self._numbers, strict=False)
        changed = [part for part in parts if part[0] is not part[1] and _differ(*part[:2])]
        if count != self._message.num_rows or not all(starmap(_replace, changed)):
            batch = as_record_batch(self.schema, columns)
            self._message = Message(count, bytearray(batch.serialize()))
            content = np.frombuffer(self._message.buffer, np.uint8)
            read = pa.ipc.read_record_batch(pa.py_buffer(self._message.buffer), batch.schema)
            self._numbers = [_numbers(column, content) for column in read.columns]
        self._columns = columns
        return self._message


def as_record_batch(schema: pa.Schema, columns: Sequence[Column]) -> pa.RecordBatch:
    """Return rows as a record batch."""
    return pa.RecordBatch.from_arrays([*map(_as_array, columns, schema.types)], schema=schema)


def _as_array(column: Column, dtype: pa.DataType) -> pa.Array:
    match column:
        case NumberColumn(values, nulls):
            filled = values if nulls is None else np.where(nulls, 0, values)
            return pa.array(filled.astype(dtype.to_pandas_dtype()), dtype, mask=nulls)
        case ListColumn(lengths, values):
            offsets = np.concatenate([[0], np.cumsum(np.maximum(lengths, 0))])
            nulls = pa.array(lengths < 0)
            child = pa.array(values.astype(np.int32), dtype.value_type)
            return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), child, type=dtype, mask=nulls)
        case pa.Array():
            return column
    return pa.array(column, dtype)


def _differ(column: Column, known: Column) -> bool:
    """Return whether columns differ, also in the sign of a zero, which `!=` ignores."""
    may_have_signs = isinstance(column, tuple) and not isinstance(column[0], int | str)
    return column != known or (may_have_signs and repr(column) != repr(known))


def _replace(column: Column, known: Column, numbers: Numbers | None) -> bool:
    """Write the numbers of a changed column to the message. Return false if it differs in more than its numbers."""
    match column, known:
        case NumberColumn(), NumberColumn():
            if not _are_equal(column.nulls, known.nulls):
                return False
            if numbers is None:
                return column.nulls is not None and bool(column.nulls.all())
            numbers[:] = column.values if column.nulls is None else np.where(column.nulls, 0, column.values)
        case ListColumn(), ListColumn():
            if numbers is None or not np.array_equal(column.lengths, known.lengths):
                return False
            numbers[:] = column.values
        case tuple(), tuple():
            if numbers is None or isinstance(column[0], list) or None in column or None in known:
                return False
            numbers[:] = column
        case _:
            return False
    return True


def _are_equal(nulls: Numbers | None, known: Numbers | None) -> bool:
    if nulls is None or known is None:
        return nulls is known
    return np.array_equal(nulls, known)


def _numbers(column: pa.Array, content: Numbers) -> Numbers | None:
    """Return the numbers of a column, or those of all its lists, as a part of the message; None for other types."""
    if pa.types.is_list(column.type):
        return None if column.null_count else _numbers(column.values, content)
    is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    memory = column.buffers()[1] if is_number and len(column) else None
    if memory is None or not memory.size:
        return None
    dtype = np.dtype(column.type.to_pandas_dtype())
    start = memory.address - content.__array_interface__["data"][0]
    numbers: Numbers = content[start : start + len(column) * dtype.itemsize].view(dtype)
    return numbers
