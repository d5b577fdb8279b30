"""Reused Arrow messages have the content of new ones."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from instrument.storage.row_batches import as_batch
from instrument.tables.message_template import ListColumn, Message, MessageTemplate, NumberColumn, as_record_batch
from instrument.tables.schemas import TABLES


def cell(draw: random.Random, dtype: pa.DataType, step: int, nulls: float) -> Any:
    """Draw a cell: numbers differ in every row, labels rarely."""
    if nulls and draw.random() < nulls:
        return None
    if pa.types.is_boolean(dtype):
        return draw.random() < 0.05
    if pa.types.is_integer(dtype):
        return step + draw.randrange(100)
    if pa.types.is_floating(dtype):
        return draw.uniform(-1.0, 1.0)
    if pa.types.is_map(dtype):
        return {"score": draw.uniform(-1.0, 1.0)}
    return draw.choice(["a"] * 50 + ["\u00e4", "b" * 300, ""])


def content(message: Message | pa.RecordBatch, schema: pa.Schema) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pa.ipc.read_record_batch(pa.py_buffer(bytes(message.serialize())), schema).to_pylist()
    return rows


@pytest.mark.spread(2)
@pytest.mark.parametrize("table", ["effects", "metrics"])
@pytest.mark.parametrize("nulls", [0.0, 0.01, 0.5])
def test_rows_of_many_steps_equal_new_messages(table: str, nulls: float) -> None:
    schema = TABLES[table].plain_schema
    draw, template, reused = random.Random(table + str(nulls)), MessageTemplate(schema), 0
    labels = [cell(draw, field.type, 0, 0.0) for field in schema]
    for step in range(60):
        count = 3 if draw.random() < 0.9 else draw.randrange(1, 5)
        rows = [
            tuple(
                label if not pa.types.is_floating(field.type) and draw.random() < 0.999
                else cell(draw, field.type, step, nulls if field.nullable else 0.0)
                for field, label in zip(schema, labels, strict=True)
            )
            for _ in range(count)
        ]  # fmt: skip
        before = template._message.buffer
        message = template.message(count, [*zip(*rows, strict=True)])
        reused += template._message.buffer is before
        assert message.num_rows == count
        assert content(message, schema) == content(as_batch(TABLES[table], rows), schema)
    assert reused > 30 or nulls == 0.5


def test_columns_of_arrays_replace_only_what_differs() -> None:
    types = {"i": pa.int32(), "f": pa.float64(), "n": pa.int64(), "l": pa.list_(pa.int32()), "s": pa.string()}
    schema, labels = pa.schema(list(types.items())), pa.array(["x", "y"])
    template, buffers = MessageTemplate(schema), []
    for step, (nulls, lengths, names) in enumerate(
        [
            ([False, True], [2, 1], labels),
            ([False, True], [2, 1], labels),
            ([False, False], [2, 1], labels),
            ([False, False], [1, 2], labels),
            ([False, False], [1, -1], labels),
            ([False, False], [1, -1], pa.array(["x", "z"])),
        ]
    ):
        missing = np.array(nulls)
        columns = [
            NumberColumn(np.array([step, 7.0])),
            NumberColumn(np.array([0.5 + step, np.nan if nulls[1] else 1.0]), missing if any(nulls) else None),
            NumberColumn(np.full(2, np.nan), np.array([True, True])),
            ListColumn(np.array(lengths), np.arange(step, step + sum(max(length, 0) for length in lengths))),
            names,
        ]
        message = template.message(2, columns)
        expected = [
            {
                "i": [step, 7][row],
                "f": None if nulls[row] else [0.5 + step, 1.0][row],
                "n": None,
                "l": None if lengths[row] < 0 else [step + k + (lengths[0] if row else 0) for k in range(lengths[row])],
                "s": names[row].as_py(),
            }
            for row in range(2)
        ]
        assert content(message, schema) == content(as_record_batch(schema, columns), schema) == expected
        buffers.append(message.buffer)
    assert [one is other for one, other in itertools.pairwise(buffers)] == [True, False, False, False, False]


def test_sign_of_zero_is_replaced() -> None:
    schema = pa.schema([("loss", pa.float32()), ("custom", pa.map_(pa.string(), pa.float64()))])
    template = MessageTemplate(schema)
    for zero in (0.0, -0.0, 0.0):
        row = {"loss": zero, "custom": [("score", zero)]}
        assert repr(content(template.message(1, [(zero,), ({"score": zero},)]), schema)) == repr([row])
