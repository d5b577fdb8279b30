"""Recorded tensors in block files: their default, dtypes and stated errors, checksums, and what a killed process leaves."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import torch
from run_folders import finished, tensor_key, write_steps
from torch import Tensor, nn

import instrument
from instrument.analysis.raw_tensors import RawTensors
from instrument.errors import SinkError
from instrument.storage import blocks
from instrument.storage import tensors as writer
from instrument.storage.checksums import DamagedFileError
from instrument.storage.maintenance import compact, recover
from instrument.storage.memory import MemorySink
from instrument.storage.parquet import ParquetSink
from instrument.storage.parts import block_files, remove_rows_after_checkpoint
from instrument.storage.remote_folder import RemoteFolder
from instrument.storage.remote_transfer import send_all
from instrument.storage.run_files import RunFiles, size_on_disk
from instrument.values.int8_rows import rounded

RECORD = {"layers": ".", "kind": "forward", "action": "record", "tensors": True}
VALUES = torch.randn(6, 4, 3, generator=torch.Generator().manual_seed(0))


def recorded(folder: Path, value: Tensor, **fields: Any) -> instrument.Run:
    """Record the output of a module with one hook, and load the run."""
    model = nn.Identity()
    with instrument.attach(model, {"kept": {**RECORD, "stats": "none", **fields}}, out=folder) as probe:
        model(value)
        probe.end_step()
    return instrument.load(folder)


def write_values(folder: Path, **options: Any) -> Path:
    """Write `VALUES`, one tensor per step, in block files."""
    steps = [{"tensors": [{"step": step, "values": value}]} for step, value in enumerate(VALUES)]
    return write_steps(folder, steps, **{"tensors": "bytes", **options})


def raw(folder: Path, **options: Any) -> RawTensors:
    return RawTensors.of(RunFiles(folder), **options)


def check(tensors: RawTensors) -> None:
    """Read all tensors, which compares them with their checksums."""
    for i in range(len(tensors.index)):
        tensors.tensor(i)


def flip_bit(file: Path, at: int) -> None:
    with open(file, "r+b") as opened:
        opened.seek(at)
        (byte,) = opened.read(1)
        opened.seek(at)
        opened.write(bytes([byte ^ 4]))


# ------------------------------------------------------------------------------------------------ what is stored as bytes


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("fields", "size"),
    [
        ({"stats": "none"}, 4),
        ({"stats": "default"}, None),
        ({"stats": "none", "dtype": "float16"}, 2),
        ({"stats": "default", "dtype": "bfloat16"}, 2),
        ({"stats": "default", "dtype": "float32"}, 4),
    ],
    ids=str,
)
def test_hooks_without_statistics_or_with_a_dtype_store_bytes(
    tmp_path: Path, fields: dict[str, Any], size: int | None
) -> None:
    run = recorded(tmp_path / "run", VALUES, **fields)
    (row,) = pq.read_table(tmp_path / "run" / "tensors").to_pylist()
    if size is None:
        assert (row["size"], row["values"]) == (None, VALUES.flatten().tolist())
    else:
        assert (row["size"], row["values"], row["data"]) == (size * VALUES.numel(), None, None)
        content = (tmp_path / "run" / "blocks" / "block-0000-000000.raw").read_bytes()
        stored = VALUES.to(getattr(torch, row["dtype"]))
        assert content[: row["size"]] == bytes(stored.view(torch.uint8).numpy())
        assert row["checksum"] == zlib.crc32(content[: row["size"]])  # it has less than 4 KB
    expected = VALUES if "dtype" not in fields else VALUES.to(getattr(torch, fields["dtype"])).float()
    assert torch.equal(torch.tensor(run.tensors()["values"][0]).float(), expected)


def test_checksum_of_pages_depends_on_each_bit_and_their_order(tmp_path: Path) -> None:
    pages = torch.randint(0, 256, (3 * 4096 + 5,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    recorded(tmp_path / "run", pages)
    (row,) = pq.read_table(tmp_path / "run" / "tensors").to_pylist()
    content = bytes(pages.numpy())
    words = [int.from_bytes(content[i : i + 8], "little") for i in range(0, 3 * 4096, 8)]
    sums = [sum(words[i : i + 512]) % 2**64 for i in range(0, len(words), 512)]
    expected = b"".join(each.to_bytes(8, "little") for each in sums) + content[3 * 4096 :]
    assert row["checksum"] == zlib.crc32(expected)
    changed = [bytearray(content) for _ in range(3)]
    changed[0][5000] ^= 128
    changed[1][-1] ^= 1
    changed[2][:8192] = content[4096:8192] + content[:4096]
    assert row["checksum"] not in [blocks.checksum_of(np.frombuffer(each, np.uint8)) for each in changed]


@pytest.mark.parametrize("has_kernel", [True, False])
@pytest.mark.parametrize(
    "shape", [(0, 3), (7, 0), (1,), (300, 1), (999, 3), (130, 16), (65, 63), (9, 2, 1024), (3, 5000)]
)
def test_rows_are_copied_and_summed_in_one_read(
    shape: tuple[int, ...], *, has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_kernel:
        monkeypatch.setattr(blocks, "native", None)
    random = np.random.default_rng(0)
    values = random.standard_normal(shape, np.float32)
    indices = random.permutation(len(values) + 2)[: len(values)]
    indices[1::3] = -1
    rows = np.zeros((len(values) + 2, 2, *shape[1:]), np.float32)
    expected = rows.copy()
    expected[indices[indices >= 0], 1] = values[indices >= 0]
    content = values.reshape(-1).view(np.uint8)
    assert blocks.copy_rows(content, rows[:, 1], indices) == blocks.checksum_of(content)
    assert np.array_equal(rows, expected)


def test_rows_are_copied_only_into_the_array() -> None:
    content, rows = np.arange(4, dtype=np.float32).view(np.uint8), np.zeros((2, 4), np.float32)
    blocks.copy_rows(content, rows[:, ::2], np.array([1, 0], np.int32))
    assert rows.tolist() == [[2, 0, 3, 0], [0, 0, 1, 0]]
    with pytest.raises(IndexError):
        blocks.copy_rows(content, rows[:, :2], np.array([0, 2]))
    rows.setflags(write=False)
    with pytest.raises(ValueError, match="read-only"):
        blocks.copy_rows(content, rows[:, :2], np.array([0, 1]))


def test_option_of_the_sink_takes_precedence(tmp_path: Path) -> None:
    for tensors in ("list", "bytes"):
        sink = ParquetSink(tmp_path / tensors, tensors=tensors)  # type: ignore[arg-type]
        (tmp_path / tensors).mkdir()
        for dtype in (None, torch.float16):
            sink.keep(tensor_key(), VALUES.shape, VALUES, dtype)
        sink.close()
        sizes = pq.read_table(tmp_path / tensors / "tensors")["size"].to_pylist()
        assert sizes == {"list": [None, None], "bytes": [4 * VALUES.numel(), 2 * VALUES.numel()]}[tensors]


def test_folder_of_the_table_is_still_one_parquet_dataset(tmp_path: Path) -> None:
    write_values(tmp_path)
    assert len(pd.read_parquet(tmp_path / "tensors")) == len(VALUES)


# ------------------------------------------------------------------------------------------------ dtypes and their errors


@pytest.mark.spread(1)
@pytest.mark.parametrize(("dtype", "bits"), [("float16", 11), ("bfloat16", 8)])
def test_half_precision_has_the_stated_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, bits: int
) -> None:
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)  # importing it fails
    run = recorded(tmp_path / "run", VALUES, dtype=dtype)
    (found,) = run.tensors()["values"]
    assert np.all(np.abs(found.astype(np.float64) - VALUES.numpy()) <= 2.0**-bits * np.abs(VALUES.numpy()))
    tensor = raw(run.folders[0]).tensor(0)
    assert tensor.dtype == getattr(torch, dtype)
    assert torch.equal(tensor, VALUES.to(tensor.dtype))


def test_int8_has_an_error_of_at_most_half_a_scale(tmp_path: Path) -> None:
    value = VALUES * torch.logspace(-30, 30, 24).view(6, 4, 1)  # rows of very different size
    value[0, 0] = 0.0
    run = recorded(tmp_path / "run", value, dtype="int8")
    (row,) = run.tensors().to_dict("records")
    scales = value.abs().amax(-1, keepdim=True).double() / 127
    error = (torch.tensor(row["values"]).double() - value.double()).abs()
    assert bool((error <= scales / 2 * (1 + 1e-5)).all())  # the scale itself is rounded to float32
    assert (row["dtype"], row["shape"]) == ("int8_scaled", (6, 4, 3))
    assert pq.read_table(tmp_path / "run" / "tensors")["size"].to_pylist() == [24 * (4 + 3)]


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    "value", [torch.tensor(-3.5), torch.zeros(2, 0), torch.zeros(0, 3), torch.arange(3.0)], ids=str
)
def test_int8_stores_tensors_of_any_shape(tmp_path: Path, value: Tensor) -> None:
    (found,) = recorded(tmp_path / "run", value, dtype="int8").tensors()["values"]
    assert (found.shape, found.dtype) == (tuple(value.shape), np.float32)
    np.testing.assert_allclose(found, value.numpy(), atol=3.5 / 127 / 2)
    np.testing.assert_array_equal(rounded(value, torch.int8)[0], found)  # in memory


def test_row_with_a_value_that_is_not_finite_is_read_as_nan(tmp_path: Path) -> None:
    value = VALUES[0].clone()
    value[1, 0], value[2, 1] = float("inf"), float("nan")
    (found,) = recorded(tmp_path / "run", value, dtype="int8").tensors()["values"]
    assert np.isnan(found).all(axis=1).tolist() == [False, True, True, False]


def test_int8_leaves_integers_unchanged(tmp_path: Path) -> None:
    for index, value in enumerate([torch.tensor([300, -5]), torch.tensor([True])]):
        (found,) = recorded(tmp_path / str(index), value, dtype="int8").tensors()["values"]
        assert torch.equal(torch.tensor(found), value)


@pytest.mark.parametrize("keep", [{}, {"keep": 2}], ids=str)
def test_memory_and_custom_sinks_get_what_files_have(tmp_path: Path, keep: dict[str, int]) -> None:
    class Sink(MemorySink):
        def keep(self, key: Any, source_shape: Any, tensor: Tensor, dtype: Any = None) -> int | None:
            assert dtype is None
            return super().keep(key, source_shape, tensor.to(dtype or tensor.dtype))

    spec = {**RECORD, "stats": "default", "dtype": "int8", **keep}
    (from_file,) = recorded(tmp_path / "run", VALUES, dtype="int8").tensors()["values"]
    for sink in (None, Sink()):
        model = nn.Identity()
        with instrument.attach(model, {"kept": spec}, sink=sink) as probe:
            model(VALUES)
            probe.end_step()
            if keep:
                probe.recorder.write_kept("kept")
        tensors = (
            probe.tensors() if sink is None else pd.DataFrame({"values": [row[-2] for row in sink.rows["tensors"]]})
        )
        (found,) = tensors["values"]
        assert np.array_equal(np.asarray(found), from_file)


# ------------------------------------------------------------------------------------------------ reading


def test_tensors_and_slices_are_read_where_they_are(tmp_path: Path) -> None:
    bytes_, lists = (
        write_values(tmp_path / "bytes"),
        write_values(tmp_path / "lists", tensors="list", parts=[2], close=False),
    )
    for folder in (bytes_, lists):
        tensors = pickle.loads(pickle.dumps(raw(folder, columns=["step"], condition=ds.field("step") > 0)))
        assert tensors.index["step"].to_pylist() == [1, 2, 3, 4, 5]
        for i, value in enumerate(VALUES[1:]):
            assert tensors.array(i).shape == (4, 3)
            for part in (slice(0, None), slice(1, 3), slice(-1, None), slice(3, 2), slice(2, 99)):
                assert torch.equal(tensors.tensor(i, part.start, part.stop), value[part])
                assert np.array_equal(tensors.array(i, part.start, part.stop), value[part].numpy())
    assert not raw(bytes_).array(0).flags.writeable
    raw(bytes_).tensor(0)[:] = 0.0  # a private copy of the memory: the file is unchanged
    tensors = raw(bytes_)
    check(tensors)
    view = tensors.array(0)
    tensors.release()
    assert np.array_equal(view, VALUES[0].numpy())


def test_slice_reads_only_its_bytes(tmp_path: Path) -> None:
    (block,) = block_files(write_values(tmp_path)).values()
    flip_bit(block, 0)
    tensors = raw(tmp_path)
    assert torch.equal(tensors.tensor(0, 1), VALUES[0, 1:])
    with pytest.raises(DamagedFileError, match=r"bytes 0 to 48 of block-0000-000000\.raw do not match their checksum"):
        tensors.tensor(0)


def test_rows_of_several_processes_have_their_own_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for rank in range(2):
        for module in ("parquet", "table_writer"):
            monkeypatch.setattr(f"instrument.storage.{module}.own_rank", lambda rank=rank: rank)
        write_steps(tmp_path, [{"tensors": [{"rank": rank, "values": VALUES[rank]}]}], tensors="bytes")
    assert [file.name for file in block_files(tmp_path).values()] == ["block-0000-000000.raw", "block-0001-000000.raw"]
    assert [
        np.array_equal(*pair) for pair in zip(instrument.load(tmp_path).tensors()["values"], VALUES, strict=False)
    ] == [True] * 2


@pytest.mark.slow
def test_sql_and_polars_read_the_bytes(tmp_path: Path) -> None:
    run = instrument.load(write_values(tmp_path, close=False, parts=[3]))
    expected = [bytes(value.numpy()) for value in VALUES]
    assert [bytes(cell) for cell in run.sql("select data from tensors order by step")["data"]] == expected
    assert [bytes(cell) for cell in run.sql("select * from tensors order by step")["data"]] == expected
    assert run.lazy("tensors").collect()["data"].to_list() == expected
    assert run.sql("select count(*) n from tensors where data is null")["n"].tolist() == [0]


def test_remote_tensors_are_read_by_range(tmp_path: Path) -> None:
    address = f"memory://{tmp_path}"
    write_values(tmp_path / "run")
    assert send_all(tmp_path / "run", RemoteFolder(address, "")).failed == {}
    run = instrument.load(address)
    assert [
        torch.equal(torch.tensor(found), value) for found, value in zip(run.tensors()["values"], VALUES, strict=True)
    ] == [True] * 6
    tensors = RawTensors.of(run.files[0])
    assert torch.equal(tensors.tensor(4, 1, 3), VALUES[4, 1:3])


# ------------------------------------------------------------------------------------------------ files


def test_block_ends_when_it_is_large_and_merged_parts_still_find_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BLOCK_BYTES", 100)  # two tensors
    write_values(tmp_path, close=False)
    assert [*map(len, (block_files(tmp_path), block_files(tmp_path, ended=True)))] == [3, 3]
    compact(tmp_path)
    assert len(pq.ParquetDataset(tmp_path / "tensors").files) == 1
    assert np.array_equal(np.stack([*instrument.load(tmp_path).tensors()["values"]]), VALUES.numpy())
    assert size_on_disk(tmp_path) > sum(file.stat().st_size for file in block_files(tmp_path).values())


def test_resumed_run_removes_the_blocks_after_its_checkpoint(tmp_path: Path) -> None:
    write_values(tmp_path, parts=[2], close=False)
    remove_rows_after_checkpoint(tmp_path, 0, {"tensors": 1})
    assert len(instrument.load(tmp_path).tensors()) == 3
    assert len(block_files(tmp_path)) == 1
    sink = ParquetSink(tmp_path, tensors="bytes", parts={"tensors": 1})
    sink.keep(tensor_key(3), VALUES[3].shape, VALUES[3])
    sink.close()
    assert np.array_equal(np.stack([*instrument.load(tmp_path).tensors()["values"]]), VALUES[:4].numpy())


def test_flipped_bit_is_reported_and_the_other_tensors_are_read(tmp_path: Path) -> None:
    (block,) = block_files(write_values(tmp_path)).values()
    flip_bit(block, 2 * 64 + 5)
    with pytest.warns(instrument.InstrumentWarning, match="bytes 128 to 176"):
        run = instrument.load(tmp_path)
        found = run.tensors()
    assert found["step"].tolist() == [0, 1, 3, 4, 5]
    assert "do not match their checksum" in run.problems[0]
    with pytest.raises(DamagedFileError):
        check(raw(tmp_path))


@pytest.mark.parametrize("how", ["cut", "removed"])
def test_missing_bytes_are_reported(tmp_path: Path, how: str) -> None:
    (block,) = block_files(write_values(tmp_path)).values()
    if how == "cut":
        os.truncate(block, 4 * 64)
    else:
        block.unlink()
    with pytest.warns(instrument.InstrumentWarning, match="block-0000-000000.raw"):
        assert len(instrument.load(tmp_path).tensors()) == (4 if how == "cut" else 0)


def test_killed_process_leaves_every_complete_step(tmp_path: Path) -> None:
    """The process is killed in the middle of a write; its reader reads while it writes, and after."""
    ready, told = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        try:
            sink = ParquetSink(tmp_path, tensors="bytes")
            for step, value in enumerate(VALUES[:5]):
                sink.keep(tensor_key(step), value.shape, value)
                sink.end_step()
            os.write(ready[1], b"x")
            os.read(told[0], 1)
            blocks.os = SimpleNamespace(
                pwrite=lambda file, content, at: os.pwrite(file, content[:10], at) and os.kill(os.getpid(), 9)
            )
            sink.keep(tensor_key(5), VALUES[5].shape, VALUES[5])
            sink.end_step()
        finally:
            os._exit(1)
    os.read(ready[0], 1)
    run = finished(tmp_path)
    assert np.array_equal(np.stack([*run.tensors()["values"]]), VALUES[:5].numpy())
    os.write(told[1], b"x")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    (block,) = block_files(tmp_path).values()
    assert block.stat().st_size == 5 * 64 + 10
    for _ in range(2):  # from the journal, and from Parquet
        assert np.array_equal(np.stack([*instrument.load(tmp_path).tensors()["values"]]), VALUES[:5].numpy())
        check(raw(tmp_path))
        compact(tmp_path)


@pytest.mark.parametrize("how", ["closed", "killed", "full"])
def test_disk_space_is_allocated_ahead_and_released(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    allocate = blocks._fallocate
    if how == "full" and allocate is not None:  # all that is left, which is not enough
        monkeypatch.setattr(blocks, "_fallocate", lambda *given: allocate(*given) or -1)
    sink = ParquetSink(tmp_path, tensors="bytes")
    value = torch.zeros(2**18)  # 1 MB
    sink.keep(tensor_key(), value.shape, value)
    sink.end_step()
    (block,) = block_files(tmp_path).values()
    is_ahead = block.stat().st_blocks * 512 >= 2**21
    assert (block.stat().st_size, is_ahead) == (2**20, allocate is not None and how != "full")
    if how == "killed":
        assert sink._tensors._block is not None
        sink._tensors._block._file.close()
        recover(tmp_path)
    else:
        sink.close()
    assert (block.stat().st_size, block.stat().st_blocks * 512 < 2**21) == (2**20, True)


def test_removed_block_is_an_error_of_the_next_step(tmp_path: Path) -> None:
    sink = ParquetSink(tmp_path, tensors="bytes")
    for step in range(2):
        sink.keep(tensor_key(step), VALUES[0].shape, VALUES[0])
        if step:
            with pytest.raises(SinkError, match="was removed while it was being written"):
                sink.end_step()
        else:
            sink.end_step()
            (block,) = block_files(tmp_path).values()
            block.unlink()


def test_error_ends_the_reading_of_all_threads() -> None:
    begun: list[int] = []

    def read(number: int) -> None:
        begun.append(number)
        if number == 1:
            raise OSError("a damaged file")
        time.sleep(0.001)

    with pytest.raises(OSError, match="a damaged file"):
        blocks.read_in_threads(read, [(number,) for number in range(300)], 3)
    assert len(begun) < 100
    assert blocks.read_in_threads(abs, [(number,) for number in range(-300, 0)], 3) == [*range(300, 0, -1)]
