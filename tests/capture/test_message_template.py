"""Reused Arrow messages have the content of new ones."""

from __future__ import annotations

import random
from typing import Any

import pyarrow as pa
import pytest

from instrument.capture.message_template import Message, MessageTemplate, RowsTemplate
from instrument.sinks.row_batches import as_batch
from instrument.spec.tables import TABLES


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


@pytest.mark.parametrize("table", ["effects", "metrics"])
@pytest.mark.parametrize("nulls", [0.0, 0.01, 0.5])
def test_rows_of_many_steps_equal_new_messages(table: str, nulls: float) -> None:
    schema = TABLES[table].plain_schema
    draw, template, reused = random.Random(table + str(nulls)), RowsTemplate(schema), 0
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
        before = template._template
        message = template.message(rows)
        reused += template._template is before
        assert message.num_rows == count
        assert content(message, schema) == content(as_batch(TABLES[table], rows), schema)
    assert reused > 30 or nulls == 0.5


def test_numbers_of_a_message_are_writable() -> None:
    batch = pa.record_batch({"i": pa.array([1, 2]), "s": ["x", "y"], "f": pa.array([0.5, None]), "b": [True, False]})
    template = MessageTemplate(batch)
    assert [numbers is None for numbers in template.numbers] == [False, True, True, True]
    assert template.numbers[0] is not None
    template.numbers[0][:] = [7, 8]
    assert content(template.message, batch.schema) == [
        {"i": 7, "s": "x", "f": 0.5, "b": True},
        {"i": 8, "s": "y", "f": None, "b": False},
    ]
