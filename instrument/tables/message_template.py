"""Arrow messages that are reused from step to step, since most steps write the same rows with other numbers.

To convert a few rows to Arrow arrays and to serialize them takes much longer than to write them. A template keeps the
message of one step, and replaces the numbers in it.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, count, starmap
from operator import is_, is_not
from typing import Any, NamedTuple, TypeAlias, overload

import numpy as np
import pyarrow as pa

from .sink_interface import Row

Numbers = np.ndarray[Any, Any]
PREFIX_BYTES = 8  # FFFFFFFF and the size of the metadata, at the start of a message
CHECKS_BYTES = 24  # of the checksums of a journal


@dataclass(slots=True, eq=False)
class NumberColumn:
    """A column of numbers or booleans."""

    # [rows]. Those of nulls are ignored.
    values: Numbers
    nulls: Numbers | None = None  # which rows have no value, bool [rows]; None if all have one

    def as_type(self, dtype: pa.DataType) -> Numbers:
        """Return the values in a dtype, 0 for nulls."""
        filled = self.values if self.nulls is None else np.where(self.nulls, 0, self.values)
        return filled.astype(dtype.to_pandas_dtype())


@dataclass(slots=True, eq=False)
class ListColumn:
    """A column of lists of integers."""

    lengths: Numbers  # the number of integers of each row, int64 [rows]; -1 for null
    values: Numbers  # the integers of all rows, concatenated


@dataclass(slots=True, eq=False)
class NumberBlock:
    """Columns of int64 or float64 numbers, which are written together."""

    # float64 [columns, rows]. Those of nulls are ignored.
    values: Numbers
    nulls: Numbers | None  # which of them have no value, bool [columns, rows]; None if all have one
    exact: Mapping[int, Numbers]  # the int64 columns that float64 would round, by index

    def column(self, index: int) -> NumberColumn:
        return NumberColumn(
            self.exact.get(index, self.values[index]), None if self.nulls is None else self.nulls[index]
        )


OwnColumn: TypeAlias = NumberColumn | ListColumn | pa.Array | tuple[Any, ...]
"""A column of rows: as arrays, or as the cells of all rows."""
Column: TypeAlias = OwnColumn | int
"""A column of rows, or its index in the block of the rows."""


class StepColumns(Sequence[Row]):
    """Rows that were recorded in one step, as columns. They become tuples only if they are read as such."""

    schema: pa.Schema  # the columns, with labels as strings
    block: NumberBlock | None = None  # several of the columns; None if each has its own array

    @property
    @abstractmethod
    def latest(self) -> tuple[int, str]:
        """Step and phase of the last row."""

    @abstractmethod
    def columns(self) -> list[Column]:
        """Return the columns, for a message."""

    def to_batch(self) -> pa.RecordBatch:
        """Return the rows as a record batch with labels as strings."""
        return as_record_batch(self.schema, self.columns(), self.block)

    @cached_property
    def _tuples(self) -> list[Row]:
        return [*zip(*map(_cells, _own(self.columns(), self.block), self.schema.types), strict=True)]

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return self._tuples[index]

    def __iter__(self) -> Iterator[Row]:
        return iter(self._tuples)


class Message(NamedTuple):
    """A serialized record batch with room for the checksums of a journal."""

    num_rows: int
    schema: pa.Schema
    # The bytes. They are only valid until the next message of the same template.
    buffer: bytearray
    body: int  # the position in the buffer at which the body begins

    @classmethod
    def of(cls, batch: pa.RecordBatch) -> Message:
        return cls(batch.num_rows, batch.schema, *with_room(batch.serialize()))

    def serialize(self) -> bytearray:
        return self.buffer


def with_room(message: pa.Buffer) -> tuple[bytearray, int]:
    """Return a message of Arrow with `CHECKS_BYTES` bytes of padding before its body, and the position of the body."""
    content = memoryview(message)
    size = size_of_metadata(content)
    metadata, body = content[PREFIX_BYTES : PREFIX_BYTES + size], content[PREFIX_BYTES + size :]
    start = content[: PREFIX_BYTES - 4].tobytes() + (size + CHECKS_BYTES).to_bytes(4, "little")
    return bytearray().join((start, metadata, bytes(CHECKS_BYTES), body)), PREFIX_BYTES + size + CHECKS_BYTES


def size_of_metadata(start: bytes | bytearray | memoryview) -> int:
    return int.from_bytes(start[PREFIX_BYTES - 4 : PREFIX_BYTES], "little")


class MessageTemplate:
    """The latest message of a table with this schema. It has the columns in which any row so far has a value."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema
        self._columns: Sequence[Column] = ()  # of the message; empty after an interrupt: the next message begins again
        self._rows: Sequence[Row] = ()  # likewise, if they were given as tuples
        self._block: NumberBlock | None = None
        self._is_included = [False] * len(schema)
        self._message = Message(0, pa.schema([]), bytearray(), 0)
        self._numbers: list[Numbers | None] = []  # for each column, the writable part of the message
        # The positions in the message of the numbers of the block, [columns, rows], and which columns are integers.
        self._words: Numbers = np.empty(0, np.int64)
        self._at: Numbers = np.empty((0, 0), np.int64)
        self._integers: list[int] = []

    def message(self, rows: int, columns: Sequence[Column], block: NumberBlock | None = None) -> Message:
        """Return the message of rows, given their columns in the order of the schema."""
        known, self._columns, self._rows = self._columns, (), ()
        parts = zip(columns, known, self._numbers, strict=False)
        changed = compress(parts, map(is_not, columns, known))
        is_same = known and rows == self._message.num_rows and all(starmap(_replace, changed))
        if not (is_same and self._replace_block(block)):
            self._begin(columns, block)
        self._block, self._columns = block, columns
        return self._message

    def message_of(self, rows: Sequence[Row]) -> Message:
        """Return the message of rows that are tuples."""
        known, self._rows, self._columns = self._rows, (), ()
        if len(rows) != len(known) or not all(map(self._replace_cells, count(), rows, known)):
            self._begin([*zip(*rows, strict=True)], None)
        self._rows = rows
        return self._message

    def _replace_cells(self, index: int, row: Row, known: Row) -> bool:
        """Write the numbers of a row that have changed to the message. Return false if the row differs in more than its numbers."""
        for cell, before, numbers in zip(row, known, self._numbers, strict=True):
            if cell is before:  # as most cells
                continue
            if numbers is None or isinstance(cell, list) or cell is None or before is None:
                if not _are_same((cell,), (before,)):
                    return False
            else:
                numbers[index] = cell
        return True

    def _replace_block(self, block: NumberBlock | None) -> bool:
        """Write the numbers of a block to the message. Return false if it has other nulls than the block before."""
        known = self._block
        if block is None or known is None:
            return block is known
        if block.values.shape != known.values.shape or not _are_equal(block.nulls, known.nulls):
            return False
        values = block.values if block.nulls is None else np.where(block.nulls, 0.0, block.values)
        words = values.view(np.int64).copy()
        for index in self._integers:
            words[index] = block.exact.get(index, values[index])
        self._words[self._at] = words
        return True

    def _begin(self, columns: Sequence[Column], block: NumberBlock | None) -> None:
        self._is_included = [
            known or not _is_empty(column) for column, known in zip(columns, self._is_included, strict=True)
        ]
        names = [name for name, is_included in zip(self.schema.names, self._is_included, strict=True) if is_included]
        batch = as_record_batch(self.schema, columns, block).select(names)
        schema = self._message.schema if batch.schema == self._message.schema else batch.schema
        self._message = Message.of(batch)._replace(schema=schema)
        content = np.frombuffer(self._message.buffer, np.uint8)
        read = iter(pa.ipc.read_record_batch(pa.py_buffer(self._message.buffer), schema).columns)
        self._numbers = [_numbers(next(read), content) if each else None for each in self._is_included]
        if block is not None:
            numbers = zip(columns, self._numbers, strict=True)
            of_block = {column: part for column, part in numbers if isinstance(column, int) and part is not None}
            parts = [of_block[index] for index in range(len(block.values))]
            self._integers = [index for index, part in enumerate(parts) if part.dtype == np.int64]
            self._words = content[: len(content) // 8 * 8].view(np.int64)
            starts = [(part.__array_interface__["data"][0] - self._words.ctypes.data) // 8 for part in parts]
            self._at = np.array(starts)[:, None] + np.arange(batch.num_rows)


def as_record_batch(schema: pa.Schema, columns: Sequence[Column], block: NumberBlock | None = None) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([*map(_as_array, _own(columns, block), schema.types)], schema=schema)


def _own(columns: Sequence[Column], block: NumberBlock | None) -> list[OwnColumn]:
    """Return columns with their own arrays."""
    return [each if block is None or not isinstance(each, int) else block.column(each) for each in columns]


def _cells(column: OwnColumn, dtype: pa.DataType) -> Sequence[Any]:
    match column:
        case NumberColumn(nulls=nulls):
            numbers: list[Any] = column.as_type(dtype).tolist()
            if nulls is None:
                return numbers
            return [None if is_null else number for is_null, number in zip(nulls, numbers, strict=True)]
        case ListColumn(lengths, values):
            ends, integers = np.cumsum(np.maximum(lengths, 0)).tolist(), values.tolist()
            sizes = zip(lengths.tolist(), ends, strict=True)
            return [None if size < 0 else integers[end - size : end] for size, end in sizes]
        case pa.Array():
            cells = column.to_pylist()
            return (
                [None if cell is None else dict(cell) for cell in cells] if pa.types.is_map(column.type) else [*cells]
            )
    return column


def _as_array(column: OwnColumn, dtype: pa.DataType) -> pa.Array:
    match column:
        case NumberColumn(nulls=nulls):
            return pa.array(column.as_type(dtype), dtype, mask=nulls)
        case ListColumn(lengths, values):
            offsets = np.concatenate([[0], np.cumsum(np.maximum(lengths, 0))])
            nulls = pa.array(lengths < 0)
            child = pa.array(values.astype(np.int32), dtype.value_type)
            return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), child, type=dtype, mask=nulls)
        case pa.Array():
            return column
    return pa.array(column, dtype)


def _is_empty(column: Column) -> bool:
    """Return whether no row has a value."""
    if isinstance(column, pa.Array):
        return bool(column.null_count == len(column))
    return isinstance(column, tuple) and column.count(None) == len(column)


def _are_same(column: Column, known: Column) -> bool:
    """Return whether columns are equal, also in the sign of a zero, which `==` ignores."""
    if column != known:
        return False
    if not (isinstance(column, tuple) and isinstance(known, tuple)):
        return True
    return all(map(is_, column, known)) or repr(column) == repr(known)


def _replace(column: Column, known: Column, numbers: Numbers | None) -> bool:
    """Write the numbers of a column to the message. Return false if it differs in more than its numbers."""
    match column, known:
        case tuple(), tuple() if not (
            numbers is None or isinstance(column[0], list) or None in column or None in known
        ):
            numbers[:] = column
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
        case _:
            return _are_same(column, known)
    return True


def _are_equal(nulls: Numbers | None, known: Numbers | None) -> bool:
    if nulls is None or known is None:
        return nulls is known
    return nulls.shape == known.shape and nulls.tobytes() == known.tobytes()


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
