"""Law 6: no hook waits for the device, and what is on its way when a step ends is read when the next one does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from devices import measured_as_on_a_device
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import instrument
from instrument.capture.transfer import Transfer
from instrument.integrations.attach import read_specs
from instrument.kinds.attached import LiveSite
from instrument.plan.sites import make_plan

# What makes Python wait for a device: these methods, and these operations below them.
WAITING_METHODS = ("item", "cpu", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__")
WAITING_OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "_unique2")


class WaitedError(Exception):
    """A hook waited for the device."""


class Guard(TorchDispatchMode):
    """Refuses operations whose result decides what comes next."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in WAITING_OPERATIONS:
            raise WaitedError(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Inside every hook, whatever would wait for a device raises; gives the names of the hooks that were met.

    There is no device: the kernel's way for one is taken for all tensors.
    """
    met: list[str] = []
    inside = [0]
    fire = LiveSite.fire

    def watched(live: LiveSite, *args: Any, **kwargs: Any) -> Tensor:
        met.append(live.site.spec.name)
        inside[0] += 1
        try:
            with Guard():
                return fire(live, *args, **kwargs)
        finally:
            inside[0] -= 1

    def refusing(name: str) -> Callable[..., Any]:
        method = getattr(Tensor, name)

        def refuse(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                raise WaitedError(name)
            return method(tensor, *args, **kwargs)

        return refuse

    for name in WAITING_METHODS:
        monkeypatch.setattr(Tensor, name, refusing(name))
    monkeypatch.setattr(LiveSite, "fire", watched)
    measured_as_on_a_device(monkeypatch)
    return met


CHANGES: dict[str, dict[str, Any]] = {
    "record": {"action": "record", "stats": "all", "quantiles": True, "histogram": True},
    "clip_values": {"action": "clip", "min": -0.5, "max": 0.5},
    "clip_norm": {"action": "clip", "norm": 0.1},
    "clip_samples": {"action": "clip", "norm": 0.1, "scope": "sample"},
    "clip_quantile": {"action": "clip", "quantile": 0.9},
    "scale": {"action": "scale", "factor": 0.5},
    "reverse": {"action": "scale", "factor": 0.5, "reverse": True},
    "channels": {"action": "scale", "factor": [0.5, 1.0, 2.0, 1.0]},
    "noise": {"action": "modify", "fn": "noise", "std": 0.1},
    "dropout": {"action": "modify", "fn": "dropout", "p": 0.5},
    "sign": {"action": "modify", "fn": "sign"},
    "mean": {"action": "modify", "fn": "mean"},
    "shuffle": {"action": "modify", "fn": "shuffle"},
    "zero": {"action": "modify", "fn": "zero"},
    "quantize": {"action": "modify", "fn": "quantize", "to": "int8"},
    "nan": {"action": "modify", "fn": "nan"},
}
PLACES = ("forward", "forward_pre", "full_backward", "full_backward_pre", "tensor", "parameter_grad")


def possible(change: str, kind: str) -> bool:
    if change == "reverse":
        return kind.startswith("forward")
    return not (
        kind == "parameter_grad" and change in ("clip_samples", "channels")
    )  # it has no samples, and its own shape


@pytest.mark.parametrize(("change", "kind"), [(c, k) for c in CHANGES for k in PLACES if possible(c, k)])
def test_no_hook_waits_for_the_device(guarded: list[str], change: str, kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    spec = {"layers": "0", "kind": kind, **CHANGES[change]}
    with instrument.attach(model, {change: spec}, optimizer=optimizer) as probe:
        for _ in range(2):
            batch = torch.randn(3, 4, requires_grad=True)
            loss = model(batch).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    assert len(guarded) >= 2
    for table in ("stats", "distributions") if change == "record" else ("effects",):
        assert len(probe.sink.rows[table]) >= 2


def impatient(tensor: Tensor, context: instrument.Context) -> Tensor:
    return tensor if tensor.sum() > 0 else tensor * 2


def test_the_guard_sees_a_hook_that_waits(guarded: list[str]) -> None:
    model = nn.Linear(4, 4)
    spec = {"layers": ".", "kind": "forward", "action": "modify", "fn": impatient}
    with instrument.attach(model, {"h": spec}), pytest.raises(instrument.HookError, match="WaitedError"):
        model(torch.randn(3, 4))
    assert guarded == ["h"]


# ------------------------------------------------------------------------------------------------ one step later


@pytest.fixture
def far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is taken to be on a device, and on its way until it is read."""

    monkeypatch.setattr(Transfer, "is_here", property(lambda transfer: not transfer._places))
    measured_as_on_a_device(monkeypatch)


SPECS = {
    "seen": {"layers": ".", "kind": "forward", "action": "record"},
    "half": {"layers": ".", "kind": "forward", "action": "scale", "factor": 0.5},
}


@pytest.mark.usefixtures("far_away")
def test_rows_of_a_step_are_written_when_the_next_one_ends_and_all_when_the_probe_is_left() -> None:
    model = nn.Linear(2, 2)
    counts = []
    with instrument.attach(model, SPECS) as probe:
        for step in range(4):
            model(torch.ones(1, 2))
            probe.end_step(loss=torch.tensor(float(step)))
            counts.append([len(probe.sink.rows[table]) for table in ("stats", "effects", "metrics")])
    assert counts == [[step] * 3 for step in range(4)]
    assert [row["step"] for row in probe.sink.records("stats")] == [0, 1, 2, 3]
    assert [(row["step"], row["loss"]) for row in probe.sink.records("metrics")] == [(i, float(i)) for i in range(4)]
    assert [row["fired"] for row in probe.sink.records("coverage")] == [4, 4]


@pytest.mark.usefixtures("far_away")
def test_a_row_of_metrics_waits_for_its_numbers_only_when_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = Transfer.read
    monkeypatch.setattr(Transfer, "read", lambda transfer: (reads.append(1), read(transfer))[1])
    with instrument.attach(nn.Linear(2, 2), {"seen": {**SPECS["seen"], "start": 99}}) as probe:
        row = probe.end_step(loss=torch.tensor(2.5), samples=4)
        assert reads == []
        assert row["loss"] == 2.5
        assert set(row) >= {"loss", "accuracy", "seconds", "samples_per_second", "skipped"}
        assert len(reads) == 1


@pytest.mark.usefixtures("far_away")
def test_an_error_in_the_loop_loses_no_step_that_has_ended() -> None:
    model = nn.Linear(2, 2)

    def train(probe: instrument.Probe) -> None:
        model(torch.ones(1, 2))
        probe.end_step(loss=torch.tensor(1.0))
        raise RuntimeError("in the loop")

    sink = instrument.MemorySink()

    probe = instrument.Probe(make_plan(read_specs(SPECS), model), sink)
    with pytest.raises(RuntimeError, match="in the loop"), probe:
        train(probe)
    assert len(sink.rows["stats"]) == len(sink.rows["metrics"]) == 1


# ------------------------------------------------------------------------------------------------ with a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("change", CHANGES)
def test_no_hook_waits_for_a_gpu(change: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    specs = {"h": {"layers": "0", "kind": "forward", **CHANGES[change]}}
    specs["kept"] = {"layers": "*", "kind": "tensor", "action": "record", "tensors": True}
    batch = torch.randn(3, 4, device="cuda")
    with instrument.attach(model, specs, optimizer=optimizer) as probe:
        for step in range(4):
            torch.cuda.set_sync_debug_mode("error" if step else "default")  # the first step builds what is kept
            try:
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            probe.end_step(loss=loss)
    assert len(probe.sink.rows["metrics"]) == 4


@pytest.mark.gpu
def test_statistics_on_a_gpu_are_those_of_the_cpu() -> None:
    tensor = torch.randn(1000, 33)
    specs = {"h": {"layers": ".", "kind": "forward", "action": "record", "stats": "all"}}
    rows = []
    for device in ("cpu", "cuda"):
        model = nn.Identity()
        with instrument.attach(model, specs) as probe:
            model(tensor.to(device))
            probe.end_step()
        rows.append(probe.sink.records("stats")[0])
    for name, value in rows[0].items():
        assert rows[1][name] == (pytest.approx(value, rel=1e-9) if isinstance(value, float) else value)
