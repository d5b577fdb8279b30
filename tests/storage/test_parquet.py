"""The Parquet sink: bit-identical values, when rows are written, and that readers see only complete files."""

from __future__ import annotations

import errno
import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from run_folders import finished, row, tensor_key, write_steps
from torch import Tensor

import instrument
from instrument.errors import SinkError
from instrument.storage import parquet, parts, tensors
from instrument.storage.journal import Journal
from instrument.storage.parquet import ParquetSink
from instrument.tables.schemas import TABLES

INTEGERS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def keep(sink: ParquetSink, *tensors: Tensor, step: int = 0) -> None:
    for tensor in tensors:
        assert sink.keep(tensor_key(step, layer="a.b"), tensor.shape, tensor) is not None


def stored(folder: Path, *tensors: Tensor, mode: Any = "list") -> instrument.Run:
    """Load a run with tensors."""
    return instrument.load(write_steps(folder, [{"tensors": [{"values": tensor} for tensor in tensors]}], tensors=mode))


def bits(tensor: Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return bytes(flat.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else flat.numpy())


def examples(dtype: torch.dtype) -> Tensor:
    if dtype in INTEGERS:
        return torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    info = torch.finfo(dtype)
    values = [0.0, -0.0, 1 / 3, info.max, info.min, info.tiny, info.smallest_normal / 2, math.nan, math.inf, -math.inf]
    return torch.tensor(values, dtype=torch.float64).to(dtype).view(2, 5)


@pytest.mark.spread(2)
@pytest.mark.parametrize("mode", ["list", "bytes"])
@pytest.mark.parametrize("dtype", [*INTEGERS, *FLOATS], ids=str)
def test_every_dtype_and_shape_is_stored_bit_identically(tmp_path: Path, mode: Any, dtype: torch.dtype) -> None:
    given = [examples(dtype), examples(dtype)[0, 0], examples(dtype)[:0], examples(dtype).t()]
    rows = stored(tmp_path, *given, mode=mode).tensors()
    for tensor, found in zip(given, rows.itertuples(), strict=True):
        back = found.values
        assert back.shape == tuple(tensor.shape) == found.shape
        assert found.dtype == str(tensor.dtype).removeprefix("torch.")
        if dtype == torch.bfloat16:  # NumPy has no bfloat16: it is loaded as float32, which represents it exactly
            assert back.dtype == np.float32
            words = np.ascontiguousarray(back).view(np.uint32)
            assert not (words & 0xFFFF).any()
            assert (words >> 16).astype(np.uint16).tobytes() == bits(tensor)
        else:
            assert back.dtype == tensor.numpy().dtype
            assert np.ascontiguousarray(back).tobytes() == bits(tensor)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["list", "bytes"])
@settings(max_examples=40)
@given(words=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=10, max_size=20))
def test_float32_of_any_bits_is_stored_bit_identically(
    tmp_path_factory: pytest.TempPathFactory, mode: Any, words: list[int]
) -> None:
    tensor = torch.tensor(words, dtype=torch.int32).view(torch.float32)
    (back,) = stored(tmp_path_factory.mktemp("run"), tensor, mode=mode).tensors()["values"]
    assert back.tobytes() == bits(tensor)


@pytest.mark.parametrize("mode", ["list", "bytes"])
def test_int64_and_float64_are_stored_as_bytes(tmp_path: Path, mode: Any) -> None:
    big = [torch.tensor([2**53 + 1]), torch.tensor([1e300, 1 + 2**-40], dtype=torch.float64)]
    run = stored(tmp_path, *big, torch.zeros(2), mode=mode)
    table = pq.read_table(tmp_path / "tensors").to_pylist()
    assert [row["values"] is None for row in table] == [True, True, mode == "bytes"]
    assert [row["size"] for row in table] == [8, 16, 8 if mode == "bytes" else None]
    assert [list(values) for values in run.tensors()["values"]] == [[2**53 + 1], [1e300, 1 + 2**-40], [0, 0]]


@pytest.mark.slow
def test_step_is_in_the_journal_and_in_a_part_after_close(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    for step in range(3):
        sink.write("metrics", [row("metrics", step=step, phase="train")])
        keep(sink, torch.full((2,), float(step)), step=step)
        sink.end_step()
        assert not list(tmp_path.rglob("*.parquet"))
        run = finished(tmp_path)
        assert list(run.metrics.step) == list(run.tensors().step) == list(range(step + 1))
        assert [values.tolist() for values in run.tensors()["values"]] == [[i, i] for i in range(step + 1)]
        assert list(run.sql("select step from metrics order by step").step) == list(range(step + 1))
        with pa.OSFile(str(tmp_path / "journal" / "metrics-0000-000000.arrows")) as file:
            assert pa.ipc.open_stream(file).read_all().column("step").to_pylist() == list(range(step + 1))
    sink.close()
    assert not (tmp_path / "journal").exists()
    assert pq.read_table(tmp_path / "metrics").column("step").to_pylist() == [0, 1, 2]
    assert pq.read_table(tmp_path / "tensors").column("step").to_pylist() == [0, 1, 2]


def test_rows_of_an_unfinished_step_are_not_read(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    sink.write("metrics", [row("metrics", phase="train")])
    sink.end_step()
    sink.write("metrics", [row("metrics", phase="train")])
    assert len(finished(tmp_path).metrics) == 1


@pytest.mark.slow
def test_large_journal_becomes_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROWS_JOURNAL_BYTES", 5_000)
    sink = ParquetSink(tmp_path)
    counts = []
    for step in range(40):
        sink.write("metrics", [row("metrics", step=step, phase="train")])
        sink.end_step()
        counts.append(len(list(tmp_path.glob("metrics/*.parquet"))))
        assert list(finished(tmp_path).metrics.step) == list(range(step + 1))
        journals = list(tmp_path.glob("journal/*.arrows"))
        assert len(journals) == 1
        assert journals[0].stat().st_size < 7_000
    assert counts[-1] >= 3
    assert counts == sorted(counts)
    sink.close()
    assert pq.read_table(tmp_path / "metrics").column("step").to_pylist() == list(range(40))


def test_many_tensors_of_a_step_are_written_as_a_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensors, "ROW_GROUP_BYTES", 10_000)
    sink = ParquetSink(tmp_path)
    for step, count in enumerate((1, 10, 2, 7)):
        keep(sink, *[torch.full((1000,), float(step))] * count, step=step)  # 4,000 bytes each
        sink.end_step()
        # A large step first flushes the journal to a part, so that parts are in step order.
        assert len(list((tmp_path / "tensors").glob("*.parquet"))) == [0, 2, 2, 4][step]
    assert list(finished(tmp_path).tensors().step) == [0] + [1] * 10 + [2] * 2 + [3] * 7
    file = pq.ParquetFile(tmp_path / "tensors" / "part-0000-000001.parquet")
    assert [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)] == [3, 3, 3, 1]
    sink.close()
    assert [values[0] for values in finished(tmp_path).tensors()["values"]] == [0] + [1] * 10 + [2] * 2 + [3] * 7


def test_tensor_changed_after_keep_is_stored_unchanged(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    tensor = torch.zeros(100_000)
    for step in range(20):
        tensor.fill_(step)
        keep(sink, tensor, step=step)
        tensor.fill_(-1)
        sink.end_step()
    sink.close()
    assert [(float(v.min()), float(v.max())) for v in finished(tmp_path).tensors()["values"]] == [
        (step, step) for step in range(20)
    ]


def test_every_table_is_readable_after_an_empty_run(tmp_path: Path) -> None:
    ParquetSink(tmp_path).close()
    for name, table in TABLES.items():
        read = pq.read_table(tmp_path / name)
        assert read.num_rows == 0
        assert read.column_names == table.schema.names
        assert list(pd.read_parquet(tmp_path / name).columns) == table.schema.names
        assert polars.read_parquet(tmp_path / name / "*.parquet").height == 0
    assert finished(tmp_path).tensors().empty


def test_files_have_the_declared_types_and_descriptions(tmp_path: Path) -> None:
    write_steps(tmp_path, [{"metrics": [{"phase": "train"}]}])
    for name, table in TABLES.items():
        schema = pq.read_schema(tmp_path / name / "part-0000-000000.parquet")
        assert schema.equals(table.schema)
        for column in table.columns:
            meaning = schema.field(column.name).metadata[b"meaning"].decode()
            assert meaning == column.meaning != ""


def replace_folder(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    folder.mkdir()


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("damage", "saved"),
    [
        (shutil.rmtree, "the folder does not exist any more: nothing is saved"),
        (replace_folder, "the folder was replaced by another one: nothing of this run is saved"),
        (lambda folder: None, "steps up to 1 were written"),
    ],
    ids=["removed", "replaced", "read-only"],
)
def test_error_reports_the_written_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damage: Callable[[Path], object], saved: str
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    sink = ParquetSink(folder)
    for step in range(2):
        sink.write("metrics", [row("metrics", step=step, phase="train")] if step == 0 else [])
        sink.write("stats", [row("stats", step=step)])
        sink.end_step()
        if step == 0:
            sink.finish_parts()
    damage(folder)
    monkeypatch.setattr(Journal, "append", read_only)
    sink.write("stats", [row("stats", step=2)])
    with pytest.raises(SinkError, match=f"Read-only file system; {saved}$"):
        sink.end_step()


def read_only(self: Journal, batch: pa.RecordBatch) -> None:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


def test_error_in_an_inaccessible_folder_reports_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = ParquetSink(tmp_path)
    sink.write("stats", [row("stats", step=0)])
    sink.end_step()

    plain = os.stat

    def denied(path: Any, **more: Any) -> os.stat_result:
        if path == tmp_path:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return plain(path, **more)

    monkeypatch.setattr("instrument.storage.parquet.os.stat", denied)
    monkeypatch.setattr(Journal, "append", read_only)
    sink.write("stats", [row("stats", step=1)])
    with pytest.raises(SinkError, match="cannot check which rows are saved: Permission denied"):
        sink.end_step()


def test_journal_changed_by_another_process_is_detected(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path)
    for step in range(2):
        sink.write("stats", [row("stats", step=step)])
        sink.end_step()
    os.truncate(tmp_path / "journal" / "stats-0000-000000.arrows", 3000)
    sink.write("stats", [row("stats", step=2)])
    message = "was changed by another process while it was being written; steps up to 1 were written"
    with pytest.raises(SinkError, match=message):
        sink.end_step()


def test_incomplete_part_is_not_visible_to_readers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = ParquetSink(tmp_path)
    sink.write("metrics", [row("metrics", phase="train")])
    sink.end_step()
    sink.finish_parts()
    sink.write("metrics", [row("metrics", phase="train")])
    sink.end_step()
    seen: list[int] = []

    def read_before_rename(source: Path, target: Path) -> None:
        """Read the run just before the part is renamed."""
        assert source.exists()
        assert [file.name for file in (tmp_path / "metrics").iterdir()] == ["part-0000-000000.parquet"]
        assert len(pd.read_parquet(tmp_path / "metrics")) == 1
        assert ds.dataset(tmp_path / "metrics").count_rows() == 1
        assert polars.read_parquet(tmp_path / "metrics").height == 1
        with duckdb.connect() as connection:
            assert connection.execute(f"select count(*) from '{tmp_path}/metrics/*.parquet'").fetchall() == [(1,)]
        seen.append(len(finished(tmp_path).metrics))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(parts.os, "replace", read_before_rename)
        with pytest.raises(KeyboardInterrupt):
            sink.finish_parts()
    assert seen == [2]  # one part and one journal
    assert len(finished(tmp_path).metrics) == 2


def test_tensor_values_are_readable_by_pandas_polars_and_duckdb(tmp_path: Path) -> None:
    stored(tmp_path, torch.tensor([[1.0, 2.0], [3.0, 4.5]]))
    assert pd.read_parquet(tmp_path / "tensors")["values"][0].tolist() == [1.0, 2.0, 3.0, 4.5]
    assert polars.read_parquet(tmp_path / "tensors")["values"].to_list() == [[1.0, 2.0, 3.0, 4.5]]
    with duckdb.connect() as connection:
        query = f"select list_sum(\"values\"), shape, hook, layer from '{tmp_path}/tensors/*.parquet'"
        assert connection.execute(query).fetchall() == [(10.5, [2, 2], "seen", "a")]


def test_parts_of_several_flushes_are_read_in_step_order(tmp_path: Path) -> None:
    write_steps(tmp_path, ({"metrics": [{"step": step, "phase": "train"}]} for step in range(12)), parts=range(12))
    assert list(pd.read_parquet(tmp_path / "metrics").step) == list(range(12))
    assert list(instrument.load(tmp_path).metrics.step) == list(range(12))


def test_process_that_ends_may_remove_the_empty_folder_of_journals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    random, removed = os.urandom, []

    def end_another_process(count: int) -> bytes:
        if not removed:
            (tmp_path / parts.JOURNALS).rmdir()
            removed.append(count)
        return random(count)

    monkeypatch.setattr(os, "urandom", end_another_process)
    sink = ParquetSink(tmp_path)
    sink.write("stats", [row("stats")])
    sink.end_step()
    sink.close()
    assert removed
    assert pq.read_table(tmp_path / "stats").num_rows == 1
