"""The tensor writer: copied once, bounded, and never dropped without a report."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from run_folders import finished, row, tensor_key
from torch import nn
from waiting import TIMEOUT

import instrument
from instrument.config.spec_file import read_specs
from instrument.errors import SinkError
from instrument.plan.hook_plan import make_plan
from instrument.storage import tensors as module
from instrument.storage.parquet import ParquetSink
from instrument.storage.table_writer import TableWriter

RECORD = {"layers": ".", "kind": "forward", "action": "record", "stats": "none", "tensors": True}


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that accepts nothing until the event is set."""
    opened = threading.Event()
    take = module.TensorWriter._receive

    def slowly(self: module.TensorWriter, copied: module.Copied) -> None:
        assert opened.wait(TIMEOUT)
        take(self, copied)

    monkeypatch.setattr(module.TensorWriter, "_receive", slowly)
    yield opened
    opened.set()


def test_hook_waits_for_a_buffer_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    monkeypatch.setattr(module, "POOL_BYTES", 100_000)
    sink = ParquetSink(tmp_path)
    kept, full = [], threading.Event()
    hurry = module.TensorWriter._write_now
    monkeypatch.setattr(module.TensorWriter, "_write_now", lambda self: (full.set(), hurry(self)))

    def train() -> None:
        for number in range(50):
            sink.keep(tensor_key(), [10_000], torch.full((10_000,), float(number)))  # 40 kB: the pool has room for two
            kept.append(number)
        sink.end_step()

    training = threading.Thread(target=train)
    training.start()
    assert full.wait(TIMEOUT)
    assert kept == [0, 1]
    gate.set()
    training.join(TIMEOUT)
    assert not training.is_alive()
    sink.close()
    assert [float(values[0]) for values in finished(tmp_path).tensors()["values"]] == list(range(50))


def test_dropped_tensors_are_counted_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    monkeypatch.setattr(module, "POOL_BYTES", 100_000)
    model = nn.Sequential(nn.Identity(), nn.Identity())
    specs = {"first": {**RECORD, "layers": "0"}, "both": {**RECORD, "layers": "*"}}
    sink = ParquetSink(tmp_path, when_full="drop")
    with instrument.Probe(make_plan(read_specs(specs), model), sink) as probe:
        model(torch.ones(10_000))  # three tensors of 40 kB
        gate.set()
        probe.end_step()
        model(torch.ones(10))
        probe.end_step()
    run = finished(tmp_path)
    dropped = {(row.hook, row.layer): row.dropped for row in run.coverage.itertuples()}
    assert dropped == {("first", "0"): 0, ("both", "0"): 0, ("both", "1"): 1}
    assert len(run.tensors()) == 5
    assert (run.coverage.fired == run.coverage.expected).all()
    (event,) = run.events[run.events.rule == "dropped"].message
    assert event.startswith("hook 'both': 1 recorded tensors were dropped")
    assert probe.warnings == [event]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("a defect")])
def test_error_in_the_writer_thread_is_raised_in_the_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def fail(self: TableWriter, batch: object) -> None:
        raise error

    monkeypatch.setattr(module, "CHECK_SECONDS", 0.01)
    sink = ParquetSink(tmp_path)
    sink.keep(tensor_key(), [3], torch.zeros(3))
    sink.write("metrics", [row("metrics", phase="train", loss=0.5)])
    sink.end_step()
    with monkeypatch.context() as patch:
        patch.setattr(sink._writers["tensors"], "append", lambda batch: fail(sink._writers["tensors"], batch))
        sink.keep(tensor_key(), [3], torch.ones(3))
        with pytest.raises(SinkError, match=r"(No space left|a defect).*steps up to 0 were written"):
            sink.end_step()
    sink.close()
    run = finished(tmp_path)
    assert len(run.tensors()) == 1
    assert "cannot write to " in run.events.message[0]


def test_error_in_the_writer_thread_reaches_a_waiting_hook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "POOL_BYTES", 100_000)

    def fail(self: module.TensorWriter, copied: module.Copied) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(module.TensorWriter, "_receive", fail)
    sink = ParquetSink(tmp_path)
    keep_ten = [sink.keep] * 10
    with pytest.raises(SinkError, match="Input/output error; nothing is saved"):
        [keep(tensor_key(), [10_000], torch.zeros(10_000)) for keep in keep_ten]
    sink.close()


@pytest.mark.spread(1)
@pytest.mark.parametrize("mode", ["list", "bytes"])
@pytest.mark.parametrize(
    "spec",
    [
        {"samples": 2},
        {"slice": ":, 1:3"},
        {"max_elements": 7},
        {"samples": 3, "slice": "::2, 0", "max_elements": 1, "dtype": "float64"},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
    ],
    ids=str,
)
def test_tensor_is_sliced_and_cast_before_it_is_copied(tmp_path: Path, mode: Any, spec: dict[str, Any]) -> None:
    given = torch.linspace(-3, 3, 40).view(4, 10)
    wanted = given
    if "samples" in spec:
        wanted = wanted[: spec["samples"]]
    if "slice" in spec:
        wanted = wanted[:, 1:3] if spec["slice"] == ":, 1:3" else wanted[::2, 0]
    if "max_elements" in spec:
        wanted = wanted.reshape(-1)[: spec["max_elements"]]
    if "dtype" in spec:
        wanted = wanted.to(getattr(torch, spec["dtype"]))
    sink = ParquetSink(tmp_path, tensors=mode, when_full="drop")  # the thread writes it
    model = nn.Identity()
    with instrument.Probe(make_plan(read_specs({"h": {**RECORD, **spec}}), model), sink) as probe:
        model(given)
        room = sink._tensors.pool.used
        probe.end_step()
    assert room <= wanted.numel() * max(4, wanted.itemsize), "elements outside the slice are not copied"
    (row,) = finished(tmp_path).tensors().itertuples()
    assert row.source_shape == (4, 10)
    assert row.shape == tuple(wanted.shape)
    assert row.dtype == str(wanted.dtype).removeprefix("torch.")
    assert torch.equal(torch.from_numpy(row.values.copy()).to(wanted.dtype), wanted)


@pytest.mark.slow
def test_pool_memory_is_bounded_and_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step needs 6 MB."""
    monkeypatch.setattr(module, "POOL_BYTES", 10_000_000)
    before = set(threading.enumerate())
    sink = ParquetSink(tmp_path)
    for step in range(6):
        for _ in range(30):
            sink.keep(tensor_key(step), [50_000], torch.zeros(50_000))
            assert sink._tensors.pool.used <= module.POOL_BYTES
        sink.end_step()
        assert sink._tensors.pool.used == 0
        (thread,) = {thread for thread in threading.enumerate() if thread.name == "instrument-tensors"} - before
    sink.close()
    assert not thread.is_alive()
    assert len(finished(tmp_path).tensors(step=5)) == 30


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6.0),
        torch.arange(6.0).view(2, 3).t(),
        torch.arange(8)[::2],
        torch.complex(*torch.ones(2, 3)).conj(),
    ],
    ids=["contiguous", "transposed", "strided", "conjugated"],
)
def test_hook_writes_bytes_in_cpu_memory_itself(tmp_path: Path, value: torch.Tensor) -> None:
    sink = ParquetSink(tmp_path, tensors="bytes")
    expected = value.clone()
    for step in range(2):
        sink.keep(tensor_key(step), value.shape, value)
        value.zero_()
        sink.end_step()
    assert (sink._tensors._thread, sink._tensors.pool.used) == (None, 0)
    sink.keep(tensor_key(2), [1], torch.ones(1), None)
    sink._tensors._submit(lambda: None)  # as for a tensor on a GPU
    sink.keep(tensor_key(3), expected.shape, expected)
    sink.close()
    found = finished(tmp_path).tensors()["values"]
    assert [torch.equal(torch.tensor(each), expected) for each in found] == [True, False, False, True]
