"""Arrow messages that are reused from step to step, since most steps write the same rows with other numbers.

To convert a few rows to Arrow arrays and to serialize them takes much longer than to write them. A template keeps the
message of one step, and replaces the numbers in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa


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
    """The message of a record batch with writable views of its numbers.

    Args:
        batch: The batch.

    Attributes:
        message: The message.
        numbers: For each column, its numbers as a writable array [rows], or those of all its lists, concatenated; None for
            labels, booleans and columns with nulls.
    """

    def __init__(self, batch: pa.RecordBatch) -> None:
        self.message = Message(batch.num_rows, bytearray(batch.serialize()))
        content = np.frombuffer(self.message.buffer, np.uint8)
        read = pa.ipc.read_record_batch(pa.py_buffer(self.message.buffer), batch.schema)
        self.numbers = [_numbers(column, content) for column in read.columns]


def _numbers(column: pa.Array, content: np.ndarray) -> np.ndarray | None:
    """Return the numbers of a column as a part of the message; None if they cannot be replaced."""
    if pa.types.is_list(column.type):
        return None if column.null_count else _numbers(column.values, content)
    is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    if not is_number or column.null_count or not len(column):
        return None
    dtype = np.dtype(column.type.to_pandas_dtype())
    start = column.buffers()[1].address - content.__array_interface__["data"][0]
    numbers: np.ndarray = content[start : start + len(column) * dtype.itemsize].view(dtype)
    return numbers


class RowsTemplate:
    """Messages of rows that differ only in their numbers from step to step, such as metrics and effects.

    Args:
        schema: The schema of the rows.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._type = pa.struct(list(schema))
        self._columns: list[tuple[Any, ...]] = []
        self._template: MessageTemplate | None = None

    def message(self, rows: Sequence[Sequence[Any]]) -> Message:
        """Return the message of rows, tuples in the order of the columns."""
        columns = list(zip(*rows, strict=True))
        if self._template is None or not self._replace(self._template, columns):
            self._template = MessageTemplate(pa.RecordBatch.from_struct_array(pa.array(rows, self._type)))
            self._columns = columns
        return self._template.message

    def _replace(self, template: MessageTemplate, columns: list[tuple[Any, ...]]) -> bool:
        """Replace the numbers of the message. Return false if other cells differ from those of the message."""
        if len(columns[0]) != template.message.num_rows:
            return False
        for cells, known, numbers in zip(columns, self._columns, template.numbers, strict=True):
            if numbers is None:
                if cells != known:
                    return False
            elif None in cells:
                return False
            elif numbers.dtype.kind != "i" or cells != known:
                numbers[:] = cells
        self._columns = columns
        return True
