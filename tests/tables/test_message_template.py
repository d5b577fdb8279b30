"""Reused Arrow messages have the content of new ones."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from instrument.storage.row_batches import as_batch
from instrument.tables import message_template
from instrument.tables.message_template import (
    Column,
    ListColumn,
    Message,
    MessageTemplate,
    NumberBlock,
    NumberColumn,
    StepColumns,
    as_record_batch,
)
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
    rows = pa.ipc.read_record_batch(pa.py_buffer(bytes(message.serialize())), message.schema).to_pylist()
    return [{name: row.get(name) for name in schema.names} for row in rows]


@pytest.mark.spread(2)
@pytest.mark.parametrize("table", ["effects", "metrics"])
@pytest.mark.parametrize("nulls", [0.0, 0.01, 0.5])
@pytest.mark.parametrize("given", ["columns", "rows"])
def test_rows_of_many_steps_equal_new_messages(table: str, nulls: float, given: str) -> None:
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
        columns = [*zip(*rows, strict=True)]
        message = template.message(count, columns) if given == "columns" else template.message_of(rows)
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


def test_blocks_of_numbers_replace_the_numbers_of_a_message() -> None:
    schema = pa.schema(
        [("a", pa.float64()), ("n", pa.int64()), ("b", pa.float64()), ("f", pa.int64()), ("s", pa.string())]
    )
    template, buffers, labels = MessageTemplate(schema), [], pa.array(["x", "y", "z"])
    large = 2**62 + 1
    for step, is_null in enumerate([False, False, True, True, False]):
        values = np.array([[step, -0.0, np.nan if is_null else 1.0], [step, 2.0, 3.0], [0.0, 0.0, 0.0]])
        block = NumberBlock(values, np.isnan(values) if is_null else None, {2: np.array([large, -1, step])})
        message = template.message(3, [0, 1, pa.nulls(3, pa.float64()), 2, labels], block)
        assert message.schema.names == ["a", "n", "f", "s"]
        cells = (
            [float(step), -0.0, None if is_null else 1.0],
            [step, 2, 3],
            [None] * 3,
            [large, -1, step],
            ["x", "y", "z"],
        )
        expected = [dict(zip(schema.names, row, strict=True)) for row in zip(*cells, strict=True)]
        assert repr(content(message, schema)) == repr(expected)
        buffers.append(message.buffer)
    assert [one is other for one, other in itertools.pairwise(buffers)] == [True, False, True, False]
    template.message(3, [1, 0, pa.nulls(3, pa.float64()), 2, labels], block)
    assert template._message.buffer is not buffers[-1]  # other columns


class Rows(StepColumns):
    """Rows with columns of each form."""

    schema = pa.schema(
        {
            **{"step": pa.int32(), "s": pa.string(), "a": pa.float64(), "f": pa.int64(), "b": pa.bool_()},
            **{"shape": pa.list_(pa.int32()), "x": pa.float32(), "custom": pa.map_(pa.string(), pa.float64())},
        }
    )
    block = NumberBlock(
        np.array([[0.5, -0.0], [0.0, 1.0]]), np.array([[False, False], [True, False]]), {1: np.array([0, 2**62 + 1])}
    )
    latest = (0, "train")

    def __len__(self) -> int:
        return 2

    def columns(self) -> list[Column]:
        lists = ListColumn(np.array([-1, 2]), np.array([3, 4]))
        custom = pa.array([None, {"y": 1.0}], self.schema.field("custom").type)
        is_held = NumberColumn(np.array([1.0, np.nan]), np.array([False, True]))
        return [
            NumberColumn(np.array([7, 8])),
            ("p", None),
            0,
            1,
            is_held,
            lists,
            NumberColumn(np.full(2, 0.1)),
            custom,
        ]


def test_tuples_of_columns_equal_the_batch() -> None:
    rows, third = Rows(), float(np.float32(0.1))
    assert repr([*rows]) == repr(
        [(7, "p", 0.5, None, True, None, third, None), (8, None, -0.0, 2**62 + 1, None, [3, 4], third, {"y": 1.0})]
    )
    batch = [tuple(row.values()) for row in rows.to_batch().to_pylist()]
    assert repr(batch).replace("[('y', 1.0)]", "{'y': 1.0}") == repr(list(rows))
    assert (rows[1], rows[:1]) == (list(rows)[1], list(rows)[:1])


def test_columns_are_included_from_their_first_value_on() -> None:
    schema = pa.schema([("a", pa.float64()), ("b", pa.string())])
    template = MessageTemplate(schema)
    included = [
        template.message(1, [(a,), (b,)]).schema.names for a, b in [(1.0, None), (None, None), (None, "x"), (2.0, None)]
    ]
    assert included == [["a"], ["a"], ["a", "b"], ["a", "b"]]


def test_interrupted_message_leaves_no_numbers_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.int64())])
    template = MessageTemplate(schema)
    template.message(1, [(0,), (5,)])

    def interrupt(column: Any, known: Any, numbers: Any) -> bool:
        if column == (6,):
            raise KeyboardInterrupt
        return replace(column, known, numbers)

    replace = message_template._replace
    monkeypatch.setattr(message_template, "_replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        template.message(1, [(1,), (6,)])
    assert content(template.message(1, [(0,), (7,)]), schema) == [{"a": 0, "b": 7}]


def test_sign_of_zero_is_replaced() -> None:
    schema = pa.schema([("loss", pa.float32()), ("custom", pa.map_(pa.string(), pa.float64()))])
    template = MessageTemplate(schema)
    for zero in (0.0, -0.0, 0.0):
        row = {"loss": zero, "custom": [("score", zero)]}
        assert repr(content(template.message(1, [(zero,), ({"score": zero},)]), schema)) == repr([row])
    for zero in (0.0, -0.0, 0.0):
        row = {"loss": zero, "custom": [("score", zero)]}
        assert repr(content(template.message_of([(zero, {"score": zero})]), schema)) == repr([row])


def test_rows_and_columns_of_one_template_alternate() -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.list_(pa.int32()))])
    template = MessageTemplate(schema)
    for number in (1000, 2000, 2000):
        for message in (template.message(1, [(1000,), ([7],)]), template.message_of([(number, [number])])):
            assert message.num_rows == 1
        assert content(message, schema) == [{"a": number, "b": [number]}]
        assert content(template.message(1, [(1000,), ([7],)]), schema) == [{"a": 1000, "b": [7]}]


def test_interrupted_rows_leave_no_numbers_in_the_next_message() -> None:
    schema = pa.schema([("a", pa.int64()), ("b", pa.float64())])
    template = MessageTemplate(schema)
    template.message_of([(0, 5.0)])
    with pytest.raises(TypeError):
        template.message_of([(1, object())])
    assert content(template.message_of([(0, 7.0)]), schema) == [{"a": 0, "b": 7.0}]
