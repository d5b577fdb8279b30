"""The in-memory sink."""

from __future__ import annotations

from instrument import MemorySink
from instrument.tables.schemas import TABLES

ROW = (3, 0, "train", 0, 0.5, None, 0.1, 1.0, 0.01, 100.0, None, None)


def test_records_have_column_names_and_written_order() -> None:
    sink = MemorySink()
    sink.write("metrics", [ROW])
    sink.write("metrics", [(4, *ROW[1:])])
    first, second = sink.records("metrics")
    assert first == dict(zip(TABLES["metrics"].names, ROW, strict=True))
    assert (first["step"], second["step"]) == (3, 4)
    frame = sink.frame("metrics")
    assert list(frame.step) == [3, 4]
    assert frame.loss[0] == 0.5
    for _ in range(2):
        sink.end_step()
    assert (sink.steps, sink.closed) == (2, False)
    sink.close()
    assert sink.closed


def test_empty_table_has_all_its_columns() -> None:
    sink = MemorySink()
    for name, table in TABLES.items():
        assert sink.records(name) == []
        assert tuple(sink.frame(name).columns) == tuple(column for column in table.names if column != "custom")
        assert sink.frame(name).empty
