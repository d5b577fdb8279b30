"""One record batch of many Arrow messages of the same layout. Arrow takes a microsecond for each column of each message.

The steps of a training write messages that differ in numbers and labels only. Their metadata is the same, so each buffer has the same
position in all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def can_stack(first: pa.RecordBatch) -> bool:
    """Return whether `stack` supports the types of a batch."""
    return all(map(_is_known, first.schema.types))


def stack(first: pa.RecordBatch, bodies: Sequence[pa.Buffer]) -> pa.RecordBatch:
    """Return the rows of messages with the same metadata and schema. `first`: the rows of the first one, which refer to its body."""
    if len(bodies) == 1:
        return first
    content = np.stack([np.frombuffer(body, np.uint8) for body in bodies])
    columns = [_stacked(column, content, bodies[0].address) for column in first.columns]
    return pa.RecordBatch.from_arrays(columns, schema=first.schema)


def _is_known(dtype: pa.DataType) -> bool:
    if pa.types.is_map(dtype):
        return _is_known(dtype.key_type) and _is_known(dtype.item_type)
    if pa.types.is_list(dtype):
        return _is_known(dtype.value_type)
    return bool(pa.types.is_primitive(dtype) or pa.types.is_string(dtype))


def _stacked(first: pa.Array, bodies: _Bytes, address: int) -> pa.Array:
    count, rows, dtype = len(bodies), len(first), first.type
    if first.null_count == rows:
        return pa.nulls(count * rows, dtype)
    validity, memory, *chars = first.buffers()[:3]

    def part(buffer: pa.Buffer, size: int) -> _Bytes:
        start = buffer.address - address
        return np.ascontiguousarray(bodies[:, start : start + size])

    def bits(buffer: pa.Buffer) -> pa.Buffer:
        each = np.unpackbits(part(buffer, -(-rows // 8)), axis=1, count=rows, bitorder="little")
        return pa.py_buffer(np.packbits(each, bitorder="little"))

    valid = bits(validity) if first.null_count else None
    if pa.types.is_boolean(dtype):
        return pa.Array.from_buffers(dtype, count * rows, [valid, bits(memory)], first.null_count * count)
    if pa.types.is_primitive(dtype):
        values = pa.py_buffer(part(memory, rows * dtype.bit_width // 8))
        return pa.Array.from_buffers(dtype, count * rows, [valid, values], first.null_count * count)
    offsets = part(memory, 4 * (rows + 1)).view(np.int32)
    sizes = offsets[:, -1]
    ends = np.cumsum(sizes, dtype=np.int32)
    buffers = [valid, pa.py_buffer(np.append(offsets[:, :-1] + (ends - sizes)[:, None], ends[-1:]))]
    if pa.types.is_string(dtype):
        longest = int(sizes.max())
        text = part(chars[0], longest)[np.arange(longest) < sizes[:, None]] if longest else b""
        return pa.Array.from_buffers(dtype, count * rows, [*buffers, pa.py_buffer(text)], first.null_count * count)
    if pa.types.is_map(dtype):
        parts = [_stacked(each, bodies, address) for each in (first.keys, first.items)]
        child = pa.StructArray.from_arrays(parts, fields=[dtype.key_field, dtype.item_field])
    else:
        child = _stacked(first.values, bodies, address)
    return pa.Array.from_buffers(dtype, count * rows, buffers, first.null_count * count, children=[child])
