"""Copies that a GPU has not completed: the end of a step does not wait for them, `close` does, and nothing is lost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from hook_runs import Calls
from run_folders import finished
from tracker_files import key, metrics
from waiting import wait_until

import instrument
from instrument.actions.base import Context, StepContext
from instrument.probe.recorder import Recorder
from instrument.stats import device_copy
from instrument.stats.device_copy import HostCopy
from instrument.storage.memory import MemorySink
from instrument.storage.parquet import ParquetSink
from instrument.storage.tensors import Pool
from instrument.tables.sink_interface import Sink


class Gpu:
    """Completes copies when told to, or when something waits for one.

    Attributes:
        copied: Whether the copies are complete.
        waits: How often something waited for a copy that was not complete.
    """

    def __init__(self) -> None:
        self.copied = False
        self.waits = 0

    def query(self) -> bool:
        return self.copied

    def synchronize(self) -> None:
        self.waits += not self.copied


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Let a GPU make all copies of tensors."""
    gpu, create = Gpu(), HostCopy.__init__

    def create_pending(copy: HostCopy, *given: torch.Tensor, **options: bool) -> None:
        create(copy, *given, **options)
        copy._copied = gpu  # type: ignore[assignment]

    monkeypatch.setattr(HostCopy, "__init__", create_pending)
    return gpu


def steps_in_memory(sink: Sink) -> list[int]:
    assert isinstance(sink, MemorySink)
    return [row["step"] for row in sink.records("tensors")]


def steps_in_files(sink: Sink) -> list[int]:
    assert isinstance(sink, ParquetSink)
    return list(finished(sink.folder).tensors()["step"])


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    ("create", "steps"),
    [(lambda folder: MemorySink(), steps_in_memory), (ParquetSink, steps_in_files)],
    ids=["MemorySink", "ParquetSink"],
)
def test_sink_stores_tensors_when_their_copies_are_complete(
    gpu: Gpu, tmp_path: Path, create: Callable[[Path], Sink], steps: Callable[[Sink], list[int]]
) -> None:
    sink = create(tmp_path)
    for step in (0, 1):
        sink.keep(key(step), [3], torch.ones(3))
        sink.end_step()
    assert steps(sink) == []
    gpu.copied = True
    sink.keep(key(2), [3], torch.ones(3))
    sink.end_step()
    assert steps(sink) == [0, 1, 2]
    assert gpu.waits == 0
    gpu.copied = False
    sink.keep(key(3), [3], torch.ones(3))
    sink.end_step()
    assert steps(sink) == [0, 1, 2]
    if isinstance(sink, ParquetSink):  # a checkpoint has to contain all tensors
        sink.finish_parts()
        assert (steps(sink), gpu.waits) == ([0, 1, 2, 3], 1)
        sink.keep(key(4), [3], torch.ones(3))
    waits, expected = gpu.waits, [0, 1, 2, 3, 4] if isinstance(sink, ParquetSink) else [0, 1, 2, 3]
    sink.close()
    assert gpu.waits == waits + 1
    assert steps(sink) == expected


def test_full_pool_waits_for_the_gpu(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.storage.tensors.POOL_BYTES", 12)  # of one tensor
    sink = ParquetSink(tmp_path)
    for step in (0, 1):
        sink.keep(key(step), [3], torch.full((3,), float(step)))
    assert gpu.waits == 1
    sink.close()
    assert steps_in_files(sink) == [0, 1]


def test_completed_copies_make_room_for_others(gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.storage.tensors.POOL_BYTES", 12)  # of one tensor
    monkeypatch.setattr("instrument.storage.tensors.ROW_GROUP_BYTES", 1)  # the thread writes each tensor at once
    sink = ParquetSink(tmp_path, when_full="drop")
    assert sink.keep(key(0), [3], torch.ones(3)) is not None
    assert sink.keep(key(1), [3], torch.ones(3)) is None
    gpu.copied = True
    wait_until(lambda: sink.keep(key(2), [3], torch.ones(3)) is not None)
    sink.close()
    assert steps_in_files(sink) == [0, 2]


def test_gpu_that_cannot_copy_stops_the_recording_like_a_full_disk(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[str] = []
    sink = ParquetSink(tmp_path, on_error="continue", report=reports.append)
    sink.write("metrics", [metrics(0, loss=1.0)])
    sink.end_step()

    def fail() -> None:
        raise RuntimeError("CUDA error")

    sink.keep(key(1), [3], torch.ones(3))
    monkeypatch.setattr(gpu, "synchronize", fail)
    monkeypatch.setattr(gpu, "query", fail)
    sink.end_step()
    for _ in range(3):
        assert sink.finish_parts()["metrics"] == 1, "a checkpoint keeps the earlier rows"
    sink.close()
    (report,) = reports
    assert "the GPU could not copy a recorded tensor: CUDA error" in report
    assert list(finished(tmp_path).metrics["step"]) == [0]


def test_hooks_of_several_gpus_keep_tensors_at_the_same_time(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "query", lambda: time.sleep(0) is None)  # lets another thread run
    sink = MemorySink()
    keep = partial(sink.keep, key(0), [3])
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(keep, [torch.ones(3)] * 400))
    assert len(sink.rows["tensors"]) == 400


def test_copies_are_on_the_cpu_whatever_the_default_device_is() -> None:
    sink = MemorySink()
    with torch.device("meta"):
        sink.keep(key(0), [3], torch.ones(3, device="cpu"))
        pooled = Pool(4096).take(8, pinned=False, wait=None)
    assert sink.rows["tensors"][0][-2].tolist() == [1.0, 1.0, 1.0]
    assert pooled is not None
    assert pooled.is_cpu


def test_step_with_tensors_of_a_gpu_ends_with_the_next_one(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = SimpleNamespace(record_event=lambda: gpu)
    monkeypatch.setattr(device_copy, "_background_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(record_event=Gpu))
    context = Context("h", "forward", "output", "a", torch.nn.ReLU(), "", StepContext(0, 0, 0, "train"))
    sink = MemorySink()
    monkeypatch.setattr(sink, "keep", lambda key, shape, tensor, dtype: 12)
    recorder = Recorder(sink)
    on_gpu = SimpleNamespace(is_cuda=True, device=torch.device("cuda", 0))
    recorder.add_tensor(context, [3], on_gpu, None)  # type: ignore[arg-type]
    recorder.end_step()
    assert (sink.steps, gpu.waits, recorder.has_pending_rows) == (0, 0, True)
    recorder.end_step()  # without tensors
    assert (sink.steps, gpu.waits) == (2, 1)


class OnGpu(torch.Tensor):
    """A tensor in CPU memory that says it is on a GPU."""

    is_cuda = True
    streams: ClassVar[list[object]] = []  # those that use memory of this class

    def record_stream(self, stream: object) -> None:
        self.streams.append(stream)


class ImitatedStream:
    """A stream that does nothing; `log` receives what is called."""

    def __init__(self, name: str, log: list[tuple[str, ...]]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: ImitatedStream) -> None:
        self.log.append((self.name, "waits for", other.name))

    def record_event(self) -> str:
        self.log.append((self.name, "event"))
        return self.name


@pytest.mark.parametrize(
    ("change", "background"),
    [
        (lambda tensor: tensor, True),
        (lambda tensor: tensor.t(), True),
        (lambda tensor: tensor[:, ::2], True),
        (lambda tensor: tensor, False),
    ],
    ids=["contiguous", "transposed", "strided", "without memory"],
)
def test_recorded_tensor_is_copied_from_a_copy_on_a_stream_of_its_own(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[torch.Tensor], torch.Tensor], background: bool
) -> None:
    """What the current stream does with the tensor afterwards, such as an operation in place, does not change the copy."""
    log: list[tuple[str, ...]] = []
    current, other = ImitatedStream("current", log), ImitatedStream("background", log)
    base = torch.arange(6.0).view(2, 3)
    tensor = change(base.as_subclass(OnGpu))
    expected = tensor.as_subclass(torch.Tensor).clone()

    @contextmanager
    def use(stream: ImitatedStream) -> Iterator[None]:
        log.append((stream.name, "copies"))
        if stream is other:
            base.fill_(-1.0)  # by the current stream, before the copy
        yield

    def fail(*given: object, **options: object) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", use)
    monkeypatch.setattr(device_copy, "_background_stream", lambda device: other)
    monkeypatch.setattr(OnGpu, "streams", [])
    if not background:
        monkeypatch.setattr(OnGpu, "clone", fail)
    copy = HostCopy(tensor, torch.empty(tensor.shape), in_background=True)
    assert torch.equal(copy.memory, expected)
    if background:
        assert log == [("background", "waits for", "current"), ("background", "copies"), ("background", "event")]
        assert OnGpu.streams == [other]
    else:
        assert log == [("current", "waits for", "background"), ("current", "copies"), ("current", "event")]


@pytest.mark.gpu
def test_operations_after_a_hook_do_not_change_a_recorded_tensor_of_a_gpu() -> None:
    model = Calls(lambda layer, x: layer(x).zero_(), layer=torch.nn.Identity())  # in place
    hooks = {"kept": {"layers": "layer", "kind": "forward", "action": "record", "tensors": True}}
    with instrument.attach(model, hooks) as probe:
        for step in range(8):
            torch.cuda._sleep(10**7)  # the GPU is busy when the hook fires
            model(torch.full((2**20,), float(step), device="cuda"))
            probe.end_step()
    rows = probe.sink.records("tensors")  # type: ignore[attr-defined]
    assert [row["values"].unique().tolist() for row in rows] == [[float(step)] for step in range(8)]
