"""Law 6: no hook waits for the device; values pending when a step ends are read when the next one ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from attached_runs import forward_steps, train_steps
from device_statistics import forget_constants, use_device_statistics
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import instrument
from instrument.hooks.attached_hook import AttachedHook
from instrument.stats import device_kernel
from instrument.stats.device_choice import measured_by
from instrument.stats.device_copy import Transfer
from instrument.stats.device_kernel import DTYPES

# Methods that make Python wait for a device, and the underlying operations.
WAITING_METHODS = ("item", "cpu", "tolist", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__")
WAITING_OPERATIONS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "unique", "_unique2")


class WaitedError(Exception):
    """Raised when a hook waits for the device."""


class NoValues(TorchDispatchMode):
    """Refuse operations whose result depends on device values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in WAITING_OPERATIONS:
            raise WaitedError(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Raise when a hook waits for a device; return the names of the hooks that fired.

    No device is needed: the code path for devices is used for all tensors.
    """
    fired: list[str] = []
    inside = [0]
    fire = AttachedHook.fire

    def fire_guarded(attached: AttachedHook, *args: Any, **kwargs: Any) -> Tensor:
        fired.append(attached.site.spec.name)
        inside[0] += 1
        try:
            with NoValues():
                return fire(attached, *args, **kwargs)
        finally:
            inside[0] -= 1

    def refuse_in_hooks(name: str) -> Callable[..., Any]:
        method = getattr(Tensor, name)

        def refuse(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            if inside[0]:
                raise WaitedError(name)
            return method(tensor, *args, **kwargs)

        return refuse

    for name in WAITING_METHODS:
        monkeypatch.setattr(Tensor, name, refuse_in_hooks(name))
    monkeypatch.setattr(AttachedHook, "fire", fire_guarded)
    use_device_statistics(monkeypatch)
    forget_constants()
    return fired


FUNCTION_KINDS = ("function", "function_grad")
CHANGES: dict[str, dict[str, Any]] = {
    "record": {"action": "record", "stats": "all", "quantiles": True, "histogram": True},
    "spectrum": {"action": "record", "stats": "none", "spectrum": 2},
    "experts": {"action": "record", "stats": "none", "experts": 2, "capacity_factor": 1.0},
    "cast": {"action": "record", "stats": "none", "cast": {"to": "float8_e4m3fn", "scale": "previous"}},
    "blocks": {"action": "record", "stats": "none", "cast": "nvfp4"},
    "change": {"action": "record", "role": "change", "stats": "all"},
    "print": {"action": "print", "stats": "all"},
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
    "resample": {"action": "modify", "fn": "resample"},
    "zero": {"action": "modify", "fn": "zero"},
    "quantize": {"action": "modify", "fn": "quantize", "to": "int8"},
    "nan": {"action": "modify", "fn": "nan"},
    "add": {"action": "modify", "fn": "add", "value": 0.5},
    "swap": {"action": "modify", "fn": "swap", "samples": [2, 0]},
    "from_sample": {"action": "modify", "fn": "patch", "from_sample": 0, "samples": [1, 2]},
    "units": {"action": "modify", "fn": "sign", "units": [0, 1, 3]},
    "slice": {"action": "clip", "norm": 0.1, "slice": "1:"},
    "heads": {"action": "record", "heads": {"of": 2, "take": [1]}},
    "when": {"action": "clip", "norm": 0.1, "when": {"stat": "l2", "above": 1, "times": "median", "after": 1}},
    "when_std": {"action": "scale", "factor": 0.5, "when": {"stat": "rms", "below": 1, "times": "std", "after": 1}},
    "record_when": {"action": "record", "histogram": True, "when": {"stat": "l2", "above": 0}},
}
KINDS = ("forward", "forward_pre", "full_backward", "full_backward_pre", "tensor", "parameter_grad", *FUNCTION_KINDS)


def spec_of(change: str, kind: str) -> dict[str, Any]:
    functions = {"functions": "linear"} if kind in FUNCTION_KINDS else {}
    return {"layers": "0", "kind": kind, **functions, **CHANGES[change]}


def tables_of(change: str) -> tuple[str, ...]:
    return {
        "record": ("stats", "distributions"),
        "spectrum": ("spectra",),
        "experts": ("experts",),
        "cast": ("casts",),
        "blocks": ("casts",),
        "change": ("stats",),
        "heads": ("stats",),
        "print": (),
        "record_when": ("stats",),
    }.get(change, ("effects",))


def possible(change: str, kind: str) -> bool:
    if change == "change":
        return kind == "forward"
    if change == "spectrum":
        return kind != "function_grad" and "full" not in kind
    if change == "experts":
        return kind in ("forward", "forward_pre", "function")
    if change == "reverse":
        return kind.startswith("forward") or kind == "function"
    return not (
        kind == "parameter_grad" and change in ("clip_samples", "channels", "heads", "swap", "from_sample")
    )  # parameter_grad has no samples and no heads, and its own shape


@pytest.mark.spread(2)
@pytest.mark.combinations
@pytest.mark.parametrize(("change", "kind"), [(c, k) for c in CHANGES for k in KINDS if possible(c, k)])
def test_no_hook_waits_for_the_device(guarded: list[str], change: str, kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    batches = [torch.randn(3, 4, requires_grad=True) for _ in range(2)]
    probe = train_steps(model, {change: spec_of(change, kind)}, batches)
    assert len(guarded) >= 2
    for table in tables_of(change):
        assert len(probe.sink.rows[table]) >= 2


def wait_for_device(tensor: Tensor, context: instrument.Context) -> Tensor:
    return tensor if tensor.sum() > 0 else tensor * 2


def test_guard_detects_a_hook_that_waits(guarded: list[str]) -> None:
    model = nn.Linear(4, 4)
    spec = {"layers": ".", "kind": "forward", "action": "modify", "fn": wait_for_device}
    with instrument.attach(model, {"h": spec}), pytest.raises(instrument.HookError, match="WaitedError"):
        model(torch.randn(3, 4))
    assert guarded == ["h"]


@pytest.fixture
def pending_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat all values as on a device, and pending until they are read."""

    monkeypatch.setattr(Transfer, "is_complete", property(lambda transfer: not transfer._layout))
    monkeypatch.setattr(Tensor, "is_cpu", False)
    use_device_statistics(monkeypatch)


SPECS = {
    "seen": {"layers": ".", "kind": "forward", "action": "record"},
    "half": {"layers": ".", "kind": "forward", "action": "scale", "factor": 0.5},
}


@pytest.mark.usefixtures("pending_transfers")
def test_rows_of_a_step_are_written_when_the_next_one_ends() -> None:
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


@pytest.mark.usefixtures("pending_transfers")
def test_metrics_row_waits_only_when_it_is_accessed(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    read = Transfer.read
    monkeypatch.setattr(Transfer, "read", lambda transfer: (reads.append(1), read(transfer))[1])
    with instrument.attach(nn.Linear(2, 2), {"seen": {**SPECS["seen"], "start": 99}}) as probe:
        row = probe.end_step(loss=torch.tensor(2.5), samples=4)
        assert reads == []
        assert row["loss"] == 2.5
        assert set(row) >= {"loss", "accuracy", "seconds", "samples_per_second", "skipped"}
        assert len(reads) == 1


@pytest.mark.usefixtures("pending_transfers")
def test_error_in_the_loop_loses_no_completed_step() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="in the loop"), instrument.attach(model, SPECS) as probe:  # noqa: PT012
        model(torch.ones(1, 2))
        probe.end_step(loss=torch.tensor(1.0))
        raise RuntimeError("in the loop")
    assert len(probe.sink.rows["stats"]) == len(probe.sink.rows["metrics"]) == 1


@contextmanager
def no_synchronization(step: int) -> Iterator[None]:
    """Raise an error if something waits for the GPU, except in the first step, which initialises caches."""
    torch.cuda.set_sync_debug_mode("error" if step else "default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("change", [change for change in CHANGES if possible(change, "forward")])
def test_no_hook_waits_for_a_gpu(change: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    specs = {"h": {"layers": "0", "kind": "forward", **CHANGES[change]}}
    specs["kept"] = {"layers": "*", "kind": "tensor", "action": "record", "tensors": True}
    batch = torch.randn(3, 4, device="cuda")
    with instrument.attach(model, specs, optimizer=optimizer) as probe:
        for step in range(4):
            with no_synchronization(step):
                loss = model(batch).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            probe.end_step(loss=loss)
    assert len(probe.sink.rows["metrics"]) == 4


@pytest.mark.gpu
@pytest.mark.parametrize(
    "change", [{"fn": "replace"}, {"fn": "patch", "slice": ":, 0:2"}], ids=lambda change: change["fn"]
)
def test_recorded_tensors_replace_those_of_a_gpu_without_waiting(tmp_path: Path, change: dict[str, Any]) -> None:
    model, batches = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(6, 3, 4)
    recorded = {"kept": {"layers": "0", "kind": "forward", "action": "record", "tensors": True}}
    with instrument.attach(model, recorded, out=tmp_path / "run") as probe:
        for batch in batches:
            expected = model(batch).detach()
            probe.end_step()
    model, on_gpu = model.cuda(), batches.cuda()
    torch.nn.init.zeros_(model[0].weight)
    torch.nn.init.zeros_(model[0].bias)
    if change["fn"] == "patch":
        expected[:, 2:] = 0.0
    spec = {"layers": "0", "kind": "forward", "action": "modify", "run": str(tmp_path / "run"), **change}
    with instrument.attach(model, {"p": spec}) as probe:
        for step in range(6):
            with no_synchronization(step):
                output = model(on_gpu[step])
            probe.end_step()
    torch.testing.assert_close(output.cpu(), expected)


@pytest.mark.gpu
def test_hook_in_a_captured_graph_of_a_gpu_is_refused() -> None:
    model, batch = nn.Linear(4, 4).cuda(), torch.randn(3, 4, device="cuda")
    model(batch)
    specs = {"h": {"layers": ".", "kind": "forward", "action": "record"}}
    with (
        instrument.attach(model, specs),
        pytest.raises(instrument.HookError, match="a CUDA graph is being captured"),
        torch.cuda.graph(torch.cuda.CUDAGraph()),
    ):
        model(batch)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_gpu_statistics_equal_cpu_statistics(dtype: torch.dtype) -> None:
    tensor = torch.randn(3000, 1033).to(dtype)
    specs = {"h": {"layers": ".", "kind": "forward", "action": "record", "stats": "all"}}
    probes = (forward_steps(nn.Identity(), specs, [tensor.to(device)] * 3) for device in ("cpu", "cuda"))
    expected, *measured = (row for probe in probes for row in probe.sink.records("stats"))
    scale = max(abs(expected["mean"]), expected["std"])  # law 5: a mean may be close to zero
    for row in measured:
        for name, value in expected.items():
            bound = pytest.approx(value, rel=1e-5, abs=1e-5 * scale if name == "mean" else 0.0)
            exact = name in ("min", "max", "abs_max") or not isinstance(value, float)
            assert name == "step" or row[name] == (value if exact else bound)
    if dtype in DTYPES:  # the first step compares the kernel, the others use it
        assert measured_by()[f"cuda:0 {str(dtype).removeprefix('torch.')}"] == "Triton kernel"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gpu_needs_triton_in_the_first_step_only(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    specs: dict[str, dict[str, Any]] = {
        "outputs": {"layers": "*", "kind": "forward", "action": "record", "stats": "default"},
        "grads": {"layers": "*", "kind": "tensor", "action": "record"},
        "tame": {"layers": "0", "kind": "forward", "action": "clip", "value": 0.5},
        "half": {"layers": "2", "kind": "tensor", "action": "scale", "factor": 0.5},
    }

    def rows(device: str) -> list[dict[str, Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 30)).to(dtype)
        batch = torch.randn(4000, 64, dtype=dtype)
        with instrument.attach(model.to(device), specs) as probe, monkeypatch.context() as patch:
            for _ in range(4):
                model(batch.to(device)).float().square().mean().backward()
                probe.end_step()
                if device == "cuda":
                    patch.setattr(device_kernel, "_launch", None)
        return [row for table in ("stats", "effects") for row in probe.sink.records(table)]

    def close(name: str, value: Any) -> Any:
        return pytest.approx(value, rel=0.1, abs=1e-2) if isinstance(value, float) or "changed" in name else value

    found, expected = rows("cuda"), rows("cpu")
    assert len(found) == 4 * (3 + 3 + 1 + 1)
    for row, wanted in zip(found, expected, strict=True):
        assert row == {name: close(name, value) for name, value in wanted.items()}
