"""Many messages of a journal as one batch: the same rows, for all tables and for messages that differ in their layout."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from instrument.storage.journal import Journal, JournalReader
from instrument.tables.schemas import TABLES


def cell(draw: random.Random, dtype: pa.DataType, nulls: float) -> Any:
    if draw.random() < nulls:
        return None
    if pa.types.is_map(dtype):
        return [(name, cell(draw, dtype.item_type, nulls)) for name in ("a", "b")]
    if pa.types.is_list(dtype):
        return [cell(draw, dtype.value_type, 0.0) for _ in range(draw.choice([2, 2, 2, 0, 3]))]
    if pa.types.is_boolean(dtype):
        return draw.random() < 0.5
    if pa.types.is_integer(dtype):
        return draw.randrange(100)
    if pa.types.is_floating(dtype):
        return draw.choice([-0.0, 1.5, float("inf")])
    text = draw.choice(["a", "b", "", "\u00e4\u00e4"])
    return text.encode() if pa.types.is_large_binary(dtype) or pa.types.is_binary(dtype) else text


def batch(draw: random.Random, schema: pa.Schema, nulls: float) -> pa.RecordBatch:
    rows = draw.choice([1, 9, 9, 9])
    columns = [[cell(draw, field.type, nulls if field.nullable else 0.0) for _ in range(rows)] for field in schema]
    return pa.record_batch([pa.array(*each) for each in zip(columns, schema.types, strict=True)], schema=schema)


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize("nulls", [0.0, 0.1, 1.0])
def test_stacked_rows_equal_those_of_the_batches(tmp_path: Path, table: str, nulls: float) -> None:
    draw, schema, path = random.Random(table + str(nulls)), TABLES[table].plain_schema, tmp_path / "j.arrows"
    written = [batch(draw, schema, nulls) for _ in range(12)]
    written += [draw.choice(written) for _ in range(12)]  # of the same layout
    written += [written[-1]] * 6 + [written[-1].select(schema.names[:3])] * 6 + [written[0]] * 2
    journal = Journal(path, schema)
    for each in written:
        journal.append(each)
    journal.close()
    plain, stacked = JournalReader.of(path), JournalReader.of(path, exclusive=True)
    assert [*plain.batches()] == written
    found = [*stacked.stacks()]
    assert len(found) <= len(written) - 4 or table == "tensors"
    for each, _ in found:
        each.validate(full=True)
    rows = [row for each, _ in found for row in each.to_pylist()]
    assert repr(rows) == repr([row for each in written for row in each.to_pylist()])
    sizes = [rows for each, rows in found for _ in range(each.num_rows // rows)]
    assert sizes == [each.num_rows for each in written]
    assert (stacked.rows, stacked.end, stacked.torn, stacked.problem) == (plain.rows, plain.end, False, None)


def test_damaged_journal_has_the_rows_before_the_damage(tmp_path: Path) -> None:
    schema, path = TABLES["metrics"].plain_schema, tmp_path / "j.arrows"
    one = batch(random.Random(0), schema, 0.0)
    journal = Journal(path, schema)
    for _ in range(8):
        journal.append(one)
    journal.close()
    content = bytearray(path.read_bytes())
    content[len(content) * 3 // 4] ^= 1
    path.write_bytes(content)
    plain, stacked = JournalReader.of(path), JournalReader.of(path)
    expected = [row for each in plain.batches() for row in each.to_pylist()]
    assert [row for each, _ in stacked.stacks() for row in each.to_pylist()] == expected
    assert plain.problem is not None
    assert stacked.problem == plain.problem
