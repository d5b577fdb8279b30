"""Rows whose numbers a kernel writes to a buffer on a device: the same as on the CPU, one launch and as many Python calls each."""

from __future__ import annotations

import math
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from imitated_driver import COMPARE, MEASURE, MEASURE_WITH_BITS, Driver, imitated_driver
from test_recorder import CONTEXT
from torch import Tensor, nn

import instrument
from instrument.actions.base import StepContext
from instrument.config.spec_file import read_specs
from instrument.plan.hook_plan import make_plan
from instrument.probe.collectives import Ranks
from instrument.probe.recorder import Recorder
from instrument.probe.slab_rows import StepSlab
from instrument.stats import cpu_kernel, device_choice, device_kernel
from instrument.storage.memory import MemorySink

RECORD = {"layers": "*", "action": "record", "stats": ["mean", "std", "min", "max", "l1", "zero_fraction", "nan_count"]}
SPECS: dict[str, dict[str, Any]] = {
    "outputs": {**RECORD, "kind": "forward"},
    "grads": {**RECORD, "kind": "tensor"},
    "clip": {"layers": "0", "kind": "forward", "action": "clip", "value": 0.5},
    "scale": {"layers": "2", "kind": "full_backward", "action": "scale", "factor": 0.5},
}


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """Measure float32 tensors on an imitated device from the second step on, like those of a GPU."""

    def set_buffers(slab: StepSlab, launched: Any, incomplete: int) -> None:
        original(slab, launched, incomplete if launched else 64)

    original = StepSlab._set_buffers
    monkeypatch.setattr(StepSlab, "_set_buffers", set_buffers)
    with imitated_driver() as state:
        yield state


def train(
    specs: dict[str, Any], steps: int = 4, first_value: float = math.inf, ranks: Ranks | None = None
) -> instrument.Probe:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = torch.randn(32, 8)
    batch[0, 0] = first_value
    plan = make_plan(read_specs(specs), model)
    with instrument.Probe(plan, MemorySink(), optimizer=optimizer, ranks=ranks) as probe:
        for _ in range(steps):
            optimizer.zero_grad()
            loss = model(batch).nan_to_num(0.0, 0.0, 0.0).square().mean()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    return probe


def rows_of(probe: instrument.Probe) -> list[dict[str, Any]]:
    return [row for table in ("stats", "effects") for row in probe.sink.records(table)]  # type: ignore[attr-defined]


def assert_rows_are_close(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for row, wanted in zip(found, expected, strict=True):
        assert row == {
            name: pytest.approx(value, rel=1e-12, abs=1e-12) if isinstance(value, float) else value
            for name, value in wanted.items()
        }


def test_rows_of_a_device_equal_those_of_the_cpu(driver: Driver) -> None:
    found = rows_of(train(SPECS))
    launches = Counter(function for function, *_ in driver.launches)
    assert launches == {MEASURE: 3 * 6, COMPARE: 3 * 2}  # in each step but the first, which has no buffer yet
    cpu_kernel.disconnect_driver()
    expected = rows_of(train(SPECS))
    assert len(found) == 4 * (6 + 2)
    assert_rows_are_close(found, expected)


def test_buffers_have_the_size_of_the_largest_step_and_alternate(driver: Driver) -> None:
    train({"outputs": SPECS["outputs"]}, steps=6)
    addresses = [results for *_, results in driver.launches]
    first, second, third, fourth, fifth = np.array(addresses).reshape(5, 3).tolist()
    assert first == third == fifth
    assert second == fourth
    assert set(first).isdisjoint(second)
    assert np.diff(first).tolist() == [11 * 8] * 2  # eleven numbers of eight bytes for each row


@pytest.mark.spread(1)
@pytest.mark.parametrize("change", [{"is_capturing": True}, {"current": 1}, {"error": 700}], ids=str)
def test_tensor_is_measured_without_a_launch_that_is_not_possible(driver: Driver, change: dict[str, Any]) -> None:
    """While a graph is captured, on another device than the current one, and if a launch fails."""
    for name, value in change.items():
        setattr(driver, name, value)
    probe = train({"outputs": SPECS["outputs"]})
    assert driver.launches == []
    found = rows_of(probe)
    cpu_kernel.disconnect_driver()
    assert found == rows_of(train({"outputs": SPECS["outputs"]}))
    assert len(found) == 4 * 3


def slab_with_buffer(width: int, rows: int = 4) -> tuple[Any, Tensor]:
    memory = torch.full((rows, 11), math.nan, dtype=torch.float64)
    slab = cpu_kernel.make_slab(width)
    slab.set_buffer(*memory.__dlpack_device__(), memory.data_ptr(), rows)
    return slab, memory


def buffer_rows(slab: Any) -> list[list[int]]:
    """Return the index of the buffer and the row there of each row."""
    found: list[list[int]] = np.frombuffer(slab.take()[1], np.int64).reshape(-1, 5)[:, 3:].tolist()
    return found


def test_slab_launches_for_tensors_that_the_kernel_reads(driver: Driver) -> None:
    slab, memory = slab_with_buffer(12)
    base = torch.randn(64, 8)
    for tensor in (base, base.t(), base[1:], base.reshape(-1)[1:], base[:, ::2], base.double(), torch.zeros(())):
        slab.add(tensor, 0, None, True)
    # A launch requires elements in a block whose address is divisible by 16. The CPU measures others here, a device refuses them.
    assert buffer_rows(slab) == [[0, 0], [0, 1], [0, 2], [-1, -1], [-1, -1]]
    np.testing.assert_allclose(memory[0, 5], base.double().mean(), rtol=1e-12)
    assert [programs for _, programs, _ in driver.launches] == [1, 1, 1]
    slab, memory = slab_with_buffer(12, rows=1)
    for _ in range(2):
        assert slab.add(torch.randn(5000), 0, None, True)
    assert buffer_rows(slab) == [[0, 0], [-1, -1]]  # the buffer is full
    assert driver.launches[-1][1] == 2  # a program reads 4096 elements
    slab.add(base, 0, None, True)
    assert buffer_rows(slab) == [[-1, -1]]  # no buffer is set after `take`


def test_launch_computes_the_bits_of_contiguous_tensors(driver: Driver) -> None:
    probe = train({"outputs": {**RECORD, "kind": "forward", "stats": ["mean", "fingerprint"]}})
    kernels = [function for function, *_ in driver.launches]
    found = rows_of(probe)
    cpu_kernel.disconnect_driver()
    assert_rows_are_close(
        found, rows_of(train({"outputs": {**RECORD, "kind": "forward", "stats": ["mean", "fingerprint"]}}))
    )
    assert kernels == [MEASURE_WITH_BITS] * 9


def test_launchers_and_buffers_are_checked(driver: Driver) -> None:
    with pytest.raises(ValueError, match="must be at least 1, got 0"):
        cpu_kernel.native.connect_driver(1, 1, 1, 0)
    slab, _ = slab_with_buffer(12)
    slab.add(torch.randn(64, 8), 0, None, True)
    assert buffer_rows(slab) == [[0, 0]]  # the driver is the one before
    for invalid in ((4, 1, 1, 1, 128), (-1, 1, 1, 1, 128), (0, 4, 1, 1, 128), (0, 1, 1, 0, 128), (0, 1, 1, 1, 0)):
        with pytest.raises(ValueError, match="kind must be 0 to 3"):
            cpu_kernel.native.add_launcher(1, 0, 0, *invalid, 32, 0, 0)
    slab = cpu_kernel.make_slab(12)
    with pytest.raises(ValueError, match="negative number of rows"):
        slab.set_buffer(1, 0, 0, -1)
    for device in range(64):
        slab.set_buffer(2, device, 0, 1)
    with pytest.raises(ValueError, match="more than 64 buffers"):
        slab.set_buffer(2, 64, 0, 1)
    cpu_kernel.disconnect_driver()
    cpu_kernel.add_launcher(torch.device("cpu"), torch.float32, 0, 1, 1, (128, 32), (torch.empty(1, 8), torch.empty(1)))
    assert not cpu_kernel.launch_devices  # slabs get no buffers without a driver


def test_rows_are_kept_if_there_is_no_memory_for_the_next_buffer(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    slab, empty = StepSlab(10, 9), torch.empty
    site = ("site",)

    def fail(*given: Any, **options: Any) -> Tensor:
        if "pin_memory" in options:  # the copy on the host
            return empty(*given, **options)
        raise torch.OutOfMemoryError("no memory")

    for step in range(4):
        monkeypatch.setattr(torch, "empty", fail if step == 1 else empty)
        assert slab.slab.add(torch.full((64, 8), float(step)), slab.slots.slot(site), None, True)
        taken = slab.take()
        taken.fetch()
        assert taken.numbers[:, 6].tolist() == [step]
    assert len(driver.launches) == 2  # the first step has no buffer yet, and the third one has none


def test_row_is_not_in_the_buffer_of_the_next_step_if_the_step_ends_during_its_launch(driver: Driver) -> None:
    slab, buffer = slab_with_buffer(12)
    next_buffer = torch.zeros(4, 9, dtype=torch.float64)

    def end_step() -> None:
        slab.take()
        slab.set_buffer(*next_buffer.__dlpack_device__(), next_buffer.data_ptr(), 4)

    driver.during_launch = end_step
    slab.add(torch.randn(64, 8), 0, None, True)
    driver.during_launch = None
    slab.add(torch.randn(64, 8), 0, None, True)
    assert len(driver.launches) == 2
    assert buffer.isfinite().any()  # what was launched first is in the buffer of its step
    assert buffer_rows(slab) == [[-1, -1], [0, 0]]  # the CPU measures the first one again


BOUNDARY: dict[str, dict[str, Any]] = {
    "grads": {**RECORD, "kind": "parameter_grad"},
    "params": {**RECORD, "kind": "step_post"},
    "updates": {**RECORD, "kind": "step_post", "role": "update"},
    "momenta": {**RECORD, "kind": "step_pre", "role": "state.momentum_buffer", "start": 1},
}


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """The ranks of a process group with one process, with `reduce: global`."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield Ranks("ddp", reduces=True, batches=2)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("on_device", [True, False], ids=["device", "CPU"])
def test_merged_rows_of_plain_tensors_come_from_the_slab(
    driver: Driver, batches: list[int], ranks: Ranks, on_device: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not on_device:
        cpu_kernel.disconnect_driver()
    specs = {**{name: SPECS[name] for name in ("outputs", "grads")}, "params": BOUNDARY["params"]}
    parts: list[str] = []
    add_part = Recorder.add_part
    monkeypatch.setattr(Recorder, "add_part", lambda *given: (parts.append(given[1].layer), add_part(*given)))
    expected = rows_of(train(specs, first_value=1.0))
    driver.launches.clear()
    batches.clear()
    found = rows_of(train(specs, first_value=1.0, ranks=ranks))
    assert parts == []
    assert (len(driver.launches), batches) == (
        (3 * (3 + 3), [4] * 3) if on_device else (0, [])
    )  # there is no buffer in the first step
    columns = ("step", "hook", "layer", "path")
    merged = {tuple(row[name] for name in columns): row for row in found}
    assert len(found) == len(merged) == len(expected) == 4 * (3 + 3 + 4)
    for wanted in expected:
        row = merged[tuple(wanted[name] for name in columns)]
        assert (row["rank"], row["scope"], row["phase"]) == (0, "global", "train")
        assert (row["shape"] is None) == (wanted["hook"] != "params")  # each process has the same parameters
        assert row["numel"] == wanted["numel"] == math.prod(wanted["shape"])
        for name in RECORD["stats"]:
            assert row[name] == pytest.approx(wanted[name], rel=1e-12, abs=1e-15)


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Interpret the kernel that measures several tensors. The list receives their number at each launch."""
    launched: list[int] = []

    def measure(device: torch.device, dtype: torch.dtype, tensors: np.ndarray[Any, Any]) -> None:
        launched.append(len(tensors))
        device_kernel.measure_batch_by_kernel(device, dtype, tensors)

    monkeypatch.setattr(device_choice, "_kernels", lambda: SimpleNamespace(measure_batch_by_kernel=measure))
    return launched


@pytest.mark.slow
def test_boundary_tensors_are_measured_by_one_launch(driver: Driver, batches: list[int]) -> None:
    found = rows_of(train(BOUNDARY, first_value=1.0))
    assert driver.launches == []
    # Four parameters. The first step has no buffer yet; the hooks of `step_post` share a launch.
    assert batches == [4, 4, 8] * 3
    cpu_kernel.disconnect_driver()
    expected = rows_of(train(BOUNDARY, first_value=1.0))
    assert len(found) == 4 * 4 * 4 - 4
    assert_rows_are_close(found, expected)


def test_boundary_tensors_are_measured_singly_with_interventions(driver: Driver, batches: list[int]) -> None:
    clip = {"layers": "*", "kind": "step_post", "action": "clip", "value": 0.05}
    specs = {"before": BOUNDARY["params"], "clip": clip, "after": BOUNDARY["params"]}
    rows = [row for row in rows_of(train(specs, first_value=1.0)) if row["hook"] in ("before", "after")]
    assert batches == []
    largest = {hook: max(abs(row["max"]) for row in rows if row["hook"] == hook) for hook in ("before", "after")}
    assert largest["before"] > 0.05 == pytest.approx(largest["after"])


@pytest.mark.parametrize(
    "factor", [torch.tensor(0.25, dtype=torch.float64), torch.tensor(math.nan), math.nan, 0.5, None], ids=str
)
def test_effect_keeps_its_factor(driver: Driver, factor: Any) -> None:
    """A clip by norm computes its factor on the device. Its other numbers are those of a launch."""
    sink = MemorySink()
    recorder, before = Recorder(sink), torch.arange(64.0)
    for step in range(3):
        moment = StepContext(step, 0, 0, "train")
        assert recorder.record_plain_effect(
            before, before / 2, recorder.slot("effects", CONTEXT, ()), moment, factor, None
        )
        recorder.end_step()
    recorder.flush()
    assert [function for function, *_ in driver.launches] == [COMPARE] * 2
    for row in sink.records("effects"):
        assert row["changed"] == 63
        assert row["norm_after"] == pytest.approx(row["norm_before"] / 2)
        found = math.nan if row["factor"] is None and factor is not None else row["factor"]
        assert found == (None if factor is None else pytest.approx(float(factor), nan_ok=True))


def test_step_cannot_end_while_tensors_wait_for_a_launch(driver: Driver, batches: list[int]) -> None:
    slab, taken = StepSlab(12, 9), []
    slab.take()
    slab._set_buffers({}, 0)
    tensor = torch.arange(64.0)
    thread = threading.Thread(target=lambda: taken.append(slab.take()))
    with slab.batched_launch():
        assert slab.slab.add(tensor, slab.slots.slot(("site",)), None, True)
        thread.start()
        thread.join(0.2)
        assert taken == []
    thread.join(10)
    (rows,) = taken
    rows.fetch()
    assert rows.numbers[0, 6] == 31.5
    assert batches == [1]


def test_only_the_thread_of_a_batch_collects_launches(driver: Driver) -> None:
    slab, memory = slab_with_buffer(12)
    slab.begin_batch()
    thread = threading.Thread(target=lambda: slab.add(torch.ones(64), 0, None, True))
    thread.start()
    thread.join()
    slab.add(torch.ones(32), 0, None, True)
    table = np.frombuffer(slab.end_batch(), np.int64).reshape(-1, 6)
    assert table[:, 4].tolist() == [32]
    assert table[0, 5] == memory[1].data_ptr()
    assert [results for *_, results in driver.launches] == [memory[0].data_ptr()]
    assert slab.end_batch() == b""


def test_row_on_a_device_takes_the_python_calls_of_one_on_the_cpu(driver: Driver) -> None:
    specs = {name: SPECS[name] for name in ("outputs", "grads")}
    on_device = calls_in_a_step(specs)
    assert len(driver.launches) == 2 * 6
    cpu_kernel.disconnect_driver()
    assert calls_in_a_step(specs) == on_device


def calls_in_a_step(specs: dict[str, Any]) -> int:
    """Return how many Python functions of the package a forward and a backward pass call."""
    model, batch = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), torch.randn(32, 8)
    counts: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and "/instrument/" in frame.f_code.co_filename:
            counts[frame.f_code.co_qualname] += 1

    with instrument.attach(model, specs) as probe:
        for step in range(3):
            sys.setprofile(count if step == 2 else None)
            model(batch).square().mean().backward()
            sys.setprofile(None)
            probe.end_step()
    return counts.total()
