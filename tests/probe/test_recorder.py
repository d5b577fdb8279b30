"""The recorder of a step: rows from host values and from device values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from attached_runs import forward_steps, train_steps
from device_statistics import use_device_statistics
from torch import Tensor, nn

import instrument
from instrument import MemorySink
from instrument.actions.base import Context, Effect, StepContext
from instrument.probe.recorder import Recorder
from instrument.stats.device_copy import Transfer
from instrument.stats.measure import measure
from instrument.stats.sums import COLUMNS

CONTEXT = Context(
    "h", "forward", "output", "a.b", nn.ReLU(), "0", StepContext(3, 1, 2, "train"), call=4, backward=2, recompute=True
)


def test_row_contains_location_and_time() -> None:
    sink = MemorySink()
    recorder = Recorder(sink)
    recorder.add_stats(CONTEXT, (4,), ("mean",), measure(torch.tensor([0.0, 1.0])), {})
    recorder.end_step()
    (row,) = sink.records("stats")
    assert {key: row[key] for key in list(row)[:14]} == {
        "step": 3, "micro_step": 1, "epoch": 2, "phase": "train", "rank": 0, "hook": "h", "layer": "a.b",
        "module_type": "ReLU", "kind": "forward", "role": "output", "path": "0", "call": 4, "backward": 2, "recompute": True,
    }  # fmt: skip
    assert row["mean"] == 0.5
    assert recorder.rows_written == 1


def test_rows_are_written_once_and_in_order() -> None:
    sink = MemorySink()
    recorder = Recorder(sink)
    for value in (1.0, 2.0):
        recorder.add_stats(CONTEXT, (4,), ("mean",), measure(torch.tensor([value])), {})
        recorder.add_effect(CONTEXT, Effect(4, [1, value, value], None))
        recorder.add_tensor(CONTEXT, (9, 9), torch.tensor([[value]]), None)
    recorder.end_step()
    recorder.end_step()
    assert [row["mean"] for row in sink.records("stats")] == [1.0, 2.0]
    assert [row["norm_before"] for row in sink.records("effects")] == [1.0, 2.0]
    kept = sink.records("tensors")
    assert [(row["values"].item(), row["shape"], row["source_shape"]) for row in kept] == [
        (1.0, [1, 1], [9, 9]),
        (2.0, [1, 1], [9, 9]),
    ]
    assert recorder.rows_written == 6
    assert sink.steps == 2


def run_everything(monkeypatch: pytest.MonkeyPatch | None) -> MemorySink:
    """Run two steps of a model with records and interventions, measured as on a device if `monkeypatch` is given."""
    if monkeypatch is not None:
        use_device_statistics(monkeypatch)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    specs = {
        "all": {"layers": "**", "kind": "forward", "action": "record", "stats": "all"},
        "few": {"layers": "2", "kind": "full_backward", "action": "record", "stats": ["l1", "nan_count"]},
        "tame": {"layers": "**", "types": "Linear", "kind": "parameter_grad", "action": "clip", "norm": 0.1},
        "low": {"layers": "1", "kind": "forward", "action": "clip", "max": 0.2},
        "half": {"layers": "0", "kind": "tensor", "action": "scale", "factor": 0.5},
    }
    return train_steps(model, specs, [torch.tensor([[math.nan, math.inf, 1.0]]), torch.randn(5, 3)]).sink


def test_rows_from_a_device_equal_rows_from_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    on_host = run_everything(None)
    on_device = run_everything(monkeypatch)
    for table in ("stats", "effects", "metrics"):
        assert len(on_host.rows[table]) == len(on_device.rows[table]) > 0
        for actual, wanted in zip(on_device.records(table), on_host.records(table), strict=True):
            for name in actual.keys() - {"seconds", "samples_per_second"}:
                assert type(actual[name]) is type(wanted[name]), name
                close = wanted[name]
                if isinstance(close, float):
                    close = pytest.approx(close, rel=1e-9, abs=1e-12, nan_ok=True)
                assert actual[name] == close, name


@pytest.mark.parametrize("measured", ["on the host", "on a device"])
def test_device_values_need_one_transfer_per_step(monkeypatch: pytest.MonkeyPatch, measured: str) -> None:
    transfers: list[int] = []
    original: Callable[[Tensor], Any] = Tensor.tolist
    items: list[int] = []

    def counted(tensor: Tensor) -> Any:
        transfers.append(tensor.numel())
        return original(tensor)

    if measured == "on a device":
        use_device_statistics(monkeypatch)
        monkeypatch.setattr(Tensor, "item", lambda tensor: items.append(1))
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    specs = {
        "all": {"layers": "**", "kind": "forward", "action": "record"},
        "tame": {"layers": "*", "kind": "forward", "action": "clip", "norm": 0.1},
    }
    with instrument.attach(model, specs) as probe:
        monkeypatch.setattr(Tensor, "tolist", counted)
        model(torch.randn(2, 3))
        assert transfers == []
        probe.end_step()
        assert items == []
    # On a device, the sums of all tensors are one matrix. An effect has a count, the sums before and after, and the clip factor.
    assert transfers == ([2, 2 * 2 * len(COLUMNS), 2] if measured == "on a device" else [])


def test_transfer_keeps_order_lengths_and_values() -> None:
    tensors = [torch.tensor(1.5), torch.tensor([2, 3]), torch.tensor([True]), torch.tensor([], dtype=torch.float16)]
    assert list(Transfer(tensors).read()) == [[1.5], [2.0, 3.0], [1.0], []]
    assert list(Transfer([]).read()) == []


def test_recorder_holds_no_graph() -> None:
    x = torch.ones(3, requires_grad=True)
    spec = {"layers": ".", "kind": "forward", "action": "record", "tensors": True}
    with instrument.attach(nn.Identity(), {"h": spec}) as probe:
        probe.plan.layers.model(x * 2)
        (kept,) = probe.sink.records("tensors")
        assert kept["values"].grad_fn is None
        assert not kept["values"].requires_grad
        assert kept["values"].tolist() == [2, 2, 2]


def test_rank_is_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    hook = {"layers": ".", "kind": "forward", "action": "record"}
    probe = forward_steps(nn.Linear(2, 2), {"seen": hook}, [torch.ones(1, 2)])
    for table in ("stats", "metrics", "coverage"):
        assert {row["rank"] for row in probe.sink.records(table)} == {3}, table


def test_memory_on_a_device_is_freed_if_another_process_writes_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    use_device_statistics(monkeypatch)
    recorder = Recorder(MemorySink())
    monkeypatch.setattr(recorder._merger, "is_duplicate", lambda context: True)
    for _ in range(2):
        measured = measure(torch.ones(2), memory=recorder.memory(torch.device("cpu")))
        recorder.add_stats(CONTEXT, (2,), ("mean",), measured, {})
        recorder.end_step()
        assert not recorder._memory.take()
