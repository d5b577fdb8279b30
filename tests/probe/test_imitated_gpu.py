"""Hooks on an imitated GPU: no hook waits for it, copies from the host, or takes more launches than documented.

Fake tensors on a CUDA device have no values: reading one raises an error. Their backward pass requires a driver, so the kinds on
gradients are tested with tensors on the meta device, which have no values either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from device_statistics import forget_constants
from hook_runs import Calls
from test_no_waiting import CHANGES, FUNCTION_KINDS, KINDS, possible, spec_of, tables_of
from tiers import tiered
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import instrument
from instrument.actions.base import Context
from instrument.actions.tensor_selection import TensorSelection, patch
from instrument.config.hook_specs import FUNCTIONS
from instrument.probe import recorder
from instrument.stats import device_copy, distribution
from instrument.stats.attention_rows import row_sums
from instrument.stats.device_copy import Transfer
from instrument.stats.exact_integers import integer_extremes
from instrument.stats.flatten import as_vector
from instrument.stats.measure import Measured, measure
from instrument.stats.portable import count_changed, portable_sums
from instrument.stats.unit_statistics import count_saturated, dead_units
from instrument.values import nested

NO_LAUNCH = ("empty", "detach", "view", "promote_types", "prim.")
PENALTIES = {"l1", "l2"}


class Launches(TorchDispatchMode):
    """Counts the operations that launch a kernel, the bytes that they read and write, and copies from the host."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0
        self.copies: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func)
        if func.is_view or any(part in name for part in NO_LAUNCH):
            return result
        inputs, outputs = (
            [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]
            for values in ((args, {key: value for key, value in (kwargs or {}).items() if key != "out"}), result)
        )
        self.count += 1
        if func is torch.ops.aten.take.default:
            inputs = inputs[1:]  # it reads one element for each index
        read = {(id(tensor.untyped_storage()), tensor.storage_offset()): tensor for tensor in inputs}
        # Memory is read in units of more than one byte, so a byte in each word costs the word.
        self.bytes += sum(
            tensor.numel() * tensor.element_size() * (max(1, tensor.stride(0)) if tensor.dim() == 1 else 1)
            for tensor in (*read.values(), *outputs)
        )
        # A number on the host is an argument of a kernel, not a copy, but `index_put_` copies it.
        copied = any(tensor.is_cpu and (tensor.dim() or "index_put" in name) for tensor in inputs)
        if copied and any(not tensor.is_cpu for tensor in outputs):
            self.copies.append(name)
        return result


class EndlessHostCopy:
    """Takes the place of a copy of the sums of a step, which requires a driver."""

    def __init__(self, memory: Tensor) -> None:
        self.shape = memory.shape

    def wait(self) -> Any:
        return self

    def numpy(self) -> np.ndarray[Any, Any]:
        return np.ones(self.shape)


@pytest.fixture
def imitated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Treat tensors without values as tensors of a GPU."""
    for module in ("tensor_gradients", "functions", "hook_coverage", "module_hooks", "attached_hook"):
        monkeypatch.setattr(f"instrument.hooks.{module}.unreadable", lambda tensor: None, raising=False)
    monkeypatch.setattr(Transfer, "read", lambda transfer: ([1.0] * count for _, count in transfer._layout))
    for module in (device_copy, recorder):
        monkeypatch.setattr(module, "HostCopy", EndlessHostCopy)
    monkeypatch.setattr(nested, "_reads_pinned_memory", lambda device: False)  # fake tensors cannot be pinned
    monkeypatch.setattr(Context, "generator", lambda context, device: None)
    forget_constants()
    yield
    forget_constants()


def copies_by_step(
    model: nn.Module, hooks: Any, inputs: Callable[[], Sequence[Tensor]], **options: Any
) -> tuple[Any, list[list[str]]]:
    """Train two steps of a model with hooks. Return the probe, and the copies from the host in each step."""
    optimizer, copies = torch.optim.SGD(model.parameters(), lr=0.1), []
    with instrument.attach(model, hooks, optimizer=optimizer, **options) as probe:
        for _ in range(2):
            with Launches() as launches:
                model(*inputs()).square().mean().backward()
                optimizer.step()
            copies.append(launches.copies)
            probe.end_step()
    return probe, copies


def test_every_function_is_tried() -> None:
    tried = {change["fn"] for change in CHANGES.values() if "fn" in change}
    known = {name for name, spec in FUNCTIONS.items() if "run" not in spec.model_fields}
    assert (tried - {"patch"}) | PENALTIES == known  # patch from another run is tried below


def rows_by_hook(probe: instrument.Probe, table: str) -> Counter[str]:
    return Counter(row["hook"] for row in probe.sink.records(table))  # type: ignore[attr-defined]


@pytest.mark.usefixtures("imitated")
@pytest.mark.parametrize("shift", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "changes",
    [
        ("record", "print", "clip_samples", "noise", "resample", "when"),
        pytest.param(
            tuple(each for each in CHANGES if possible(each, "forward") and possible(each, "forward_pre")),
            marks=pytest.mark.slow,
        ),
    ],
    ids=["few", "all"],
)
def test_hooks_on_a_fake_gpu_neither_wait_nor_copy(changes: tuple[str, ...], shift: int) -> None:
    """Each change is a hook of another layer. A test below tries the other changes without values."""
    kinds = ("forward", "forward_pre")
    specs = {change: {**spec_of(change, kinds[(i + shift) % 2]), "layers": str(i)} for i, change in enumerate(changes)}
    with FakeTensorMode():
        model = nn.ModuleList([nn.Linear(4, 4, device="cuda") for _ in changes])
        with instrument.attach(model, specs) as probe:
            for step in range(2):
                for change, layer in zip(changes, model, strict=True):
                    with Launches() as launches:
                        layer(torch.empty(3, 4, device="cuda"))
                    assert launches.copies == [] or not step, f"{change}: only constants, in the first step"
                probe.end_step()
    assert {row["hook"]: row["fired"] for row in probe.coverage()} == dict.fromkeys(changes, 2)
    assert all(rows_by_hook(probe, table)[change] == 2 for change in changes for table in tables_of(change))


@pytest.mark.slow
@pytest.mark.usefixtures("imitated")
@pytest.mark.parametrize("split", [{}, {"split_dim": 1}])
def test_attention_on_a_fake_gpu_neither_waits_nor_copies(split: dict[str, int]) -> None:
    hooks = {
        role: {"layers": "*", "kind": "function", "role": role, "action": "record", "stats": "all", **split}
        for role in ("attention", "scores")
    }
    with FakeTensorMode():
        attention = nn.MultiheadAttention(8, 2, batch_first=True, device="cuda")
        model = nn.ModuleList([Calls(F.scaled_dot_product_attention), attention])
        with instrument.attach(model, hooks) as probe:
            for step in range(2):
                with Launches() as launches:
                    model[0](*(torch.empty(3, 2, 5, 4, device="cuda") for _ in range(3)), is_causal=True)
                    model[1](*[torch.empty(3, 5, 8, device="cuda")] * 3)
                assert launches.copies == [] or not step, "only constants, in the first step"
                probe.end_step()
    assert {row["hook"]: row["fired"] for row in probe.coverage()} == dict.fromkeys(hooks, 2)
    assert all(rows_by_hook(probe, "stats")[hook] == (8 if split else 4) for hook in hooks)


@pytest.mark.usefixtures("imitated")
def test_sums_of_each_device_are_copied_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model whose modules are on several devices, one of them offloaded to the host."""
    copied: list[tuple[str, int]] = []

    class NotedCopy(EndlessHostCopy):
        def __init__(self, memory: Tensor) -> None:
            super().__init__(memory)
            copied.append((str(memory.device), len(memory)))

    monkeypatch.setattr(recorder, "HostCopy", NotedCopy)
    places, fake = ("cuda:0", "cuda:1", "cuda:1", "cpu"), FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        model = nn.ModuleList([nn.Linear(4, 4, device=place) for place in places[:-1]])
    model.append(nn.Linear(4, 4))
    with instrument.attach(
        model, {"h": {"layers": "*", "kind": "forward", "action": "record", "stats": ["numel", "max"]}}
    ) as probe:
        for step in range(3):
            with fake:
                for layer, place in zip(model, places[:-1], strict=False):
                    layer(torch.empty(3, 4, device=place))
            output = model[3](torch.full((3, 4), float(step)))
            copied.clear()
            probe.end_step()
            assert copied == [("cuda:0", 1), ("cuda:1", 2)]
    rows = {(row["step"], row["layer"]): row["max"] for row in probe.sink.records("stats")}
    assert set(rows) == {(step, str(layer)) for step in range(3) for layer in range(4)}
    assert rows[2, "3"] == pytest.approx(output.max().item())


@pytest.mark.usefixtures("imitated")
def test_statistics_of_gradients_neither_wait_nor_copy() -> None:
    model = nn.Linear(4, 4, device="meta")
    optimizer, inputs = torch.optim.SGD(model.parameters(), lr=0.1), torch.empty(5, 4, device="meta")
    of_gradients = ["previous_cosine", "gradient_noise", "gradient_signal"]
    hooks = {
        "g": {"layers": "**", "kind": "parameter_grad", "action": "record", "stats": of_gradients},
        "u": {
            "layers": "**",
            "kind": "step_post",
            "role": "update",
            "action": "record",
            "stats": "update_ratio_per_rate",
        },
    }
    with instrument.attach(model, hooks, optimizer=optimizer) as probe:
        for _ in range(2):
            with Launches() as launches:
                for _ in range(2):
                    model(inputs).square().mean().backward()
                    probe.end_micro_step()
                optimizer.step()
            assert launches.copies == []
            probe.end_step()
    assert rows_by_hook(probe, "stats") == {"g": 4, "u": 4}


@pytest.mark.usefixtures("imitated")
def test_samples_on_a_fake_gpu_are_copied_when_the_step_ends() -> None:
    with FakeTensorMode():
        model = nn.Linear(4, 4, device="cuda")
        with instrument.attach(model, {}, ids="all") as probe:
            for step in range(2):
                with Launches() as launches:
                    ids, targets = (
                        torch.empty(3, device="cuda", dtype=dtype) for dtype in (torch.int64, torch.float32)
                    )
                    probe.batch(ids=ids, targets=targets)
                    model(torch.empty(3, 4, device="cuda"))
                    probe.end_micro_step()
                assert launches.copies == []
                probe.end_step()
                assert len(probe.sink.rows["samples"]) == 3 * step, "rows are read when the next step ends"
    rows = probe.sink.rows["samples"]
    assert [row[5:] for row in rows] == [(position, 1.0, None, 1.0, "float32") for position in range(3)] * 2


@pytest.mark.parametrize(("dtype", "most_bytes"), [(torch.int64, 8.1), (torch.uint64, 24.1)], ids=str)
def test_extremes_of_64_bit_integers_are_not_copied(dtype: torch.dtype, most_bytes: float) -> None:
    with FakeTensorMode():
        tensor = torch.empty(BIG, device="cuda", dtype=dtype)
        with Launches() as launches:
            found = integer_extremes(tensor, ("max",), Measured(), is_part=True)
    assert found is not None
    assert (found.shape, found.dtype, found.device.type) == ((4,), torch.float64, "cuda")
    assert launches.copies == []
    assert launches.count <= 8
    assert launches.bytes / BIG <= most_bytes


def test_jagged_tensor_on_a_device_is_read_without_its_lengths() -> None:
    values, offsets = torch.empty(5, 2, device="meta"), torch.empty(3, dtype=torch.int64, device="meta")
    assert as_vector(torch.nested.nested_tensor_from_jagged(values, offsets)).shape == (10,)


def patched(recorded: Tensor) -> Tensor:
    part = TensorSelection((3, 4), (slice(None), slice(1, 3)))
    tensor = torch.empty(3, 4, device="cuda", dtype=torch.bfloat16)
    return part.into(tensor, patch(part.of(tensor), recorded, part))


def batch_on_device(batch: Tensor) -> Tensor:
    moved: Tensor = nested.to_device({"image": batch}, torch.device("cuda", 0))["image"]
    return moved


@pytest.mark.parametrize(
    ("copy_to_device", "shape", "dtype"),
    [(patched, (3, 4), torch.bfloat16), (patched, (3, 2), torch.bfloat16), (batch_on_device, (3, 4), torch.float32)],
)
def test_tensor_of_the_host_is_copied_without_waiting(
    monkeypatch: pytest.MonkeyPatch,
    copy_to_device: Callable[[Tensor], Tensor],
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> None:
    host, pinned, copies = torch.ones(shape), [], []
    assert not nested._can_be_pinned(torch.ones(1, 5).expand(4, 5)), "its rows share their memory"
    monkeypatch.setattr(nested, "_reads_pinned_memory", lambda device: device.type == "cuda")
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: (pinned.append(tensor), tensor)[1])

    class Copies(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._to_copy.default and args[0].is_cpu:
                copies.append(kwargs)
            return func(*args, **(kwargs or {}))

    with FakeTensorMode(allow_non_fake_inputs=True), Copies():
        new = copy_to_device(host)
    assert (new.device.type, new.dtype, new.shape) == ("cuda", dtype, (3, 4))
    assert pinned == [host]
    (copy,) = copies  # a conversion in the same copy would need unpinned memory
    assert (copy["device"].type, copy["dtype"], copy["non_blocking"]) == ("cuda", torch.float32, True)


@pytest.mark.usefixtures("imitated")
def test_hook_in_a_captured_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hooks = {"seen": {"layers": "0", "kind": "forward", "action": "record"}}
    with FakeTensorMode():
        model = nn.Sequential(nn.Linear(4, 4, device="cuda"), nn.ReLU())
        with instrument.attach(model, hooks):
            model(torch.empty(3, 4, device="cuda"))
            monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
            monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
            with pytest.raises(instrument.HookError, match=r"hook 'seen' .*: a CUDA graph is being captured"):
                model(torch.empty(3, 4, device="cuda"))


@pytest.mark.slow
@pytest.mark.usefixtures("imitated")
@pytest.mark.parametrize("shift", tiered(range(len(KINDS)), [7]))
def test_hooks_without_values_work_forward_and_backward(shift: int) -> None:
    """Each change is a hook of another layer, and has each kind at one of the shifts. All changes are possible at shift 7."""
    kinds = {change: KINDS[(i + shift) % len(KINDS)] for i, change in enumerate(CHANGES)}
    tried = [change for change, kind in kinds.items() if possible(change, kind)]
    specs = {change: {**spec_of(change, kinds[change]), "layers": str(i)} for i, change in enumerate(tried)}
    model = nn.Sequential(*(nn.Linear(4, 4, device="meta") for _ in tried))
    probe, copies = copies_by_step(model, specs, lambda: [torch.empty(3, 4, device="meta", requires_grad=True)])
    assert copies[1] == []
    assert {row["hook"] for row in probe.coverage()} == {*tried}
    assert all(row["fired"] == 2 for row in probe.coverage())
    assert all(rows_by_hook(probe, table)[change] >= 2 for change in tried for table in tables_of(change))


def hooks_of_every_kind(**spec: Any) -> dict[str, dict[str, Any]]:
    hooks = {kind: {"layers": str(i), "kind": kind, **spec} for i, kind in enumerate(KINDS)}
    for kind in FUNCTION_KINDS:
        hooks[kind]["functions"] = "linear"
    return hooks


@pytest.mark.slow
@pytest.mark.usefixtures("imitated")
@pytest.mark.parametrize("change", [{"fn": "replace"}, {"fn": "patch", "slice": "0:2"}], ids=["replace", "patch"])
def test_recorded_tensor_is_copied_once_per_firing(tmp_path: Path, change: dict[str, str]) -> None:
    def train(device: str, hooks: dict[str, Any], out: Path | None = None) -> list[list[str]]:
        model = nn.Sequential(*(nn.Linear(4, 4, device=device) for _ in KINDS))
        return copies_by_step(model, hooks, lambda: [torch.zeros(3, 4, device=device, requires_grad=True)], out=out)[1]

    train("cpu", hooks_of_every_kind(action="record", tensors=True), tmp_path / "run")
    firings = len(KINDS) + 1  # `parameter_grad` changes weight and bias
    found = train("meta", hooks_of_every_kind(action="modify", run=str(tmp_path / "run"), **change))
    assert found == [["aten._to_copy.default"] * firings] * 2


@pytest.mark.spread(1)
@pytest.mark.usefixtures("imitated")
@pytest.mark.parametrize("fields", [{"fn": "add"}, {"fn": "project_out"}, {"fn": "add", "units": [0, 1, 3]}], ids=str)
def test_vector_is_copied_to_the_device_once(workdir: Path, fields: dict[str, Any]) -> None:
    np.save("vector.npy", np.ones(4))
    model = nn.Sequential(*(nn.Linear(4, 4, device="meta") for _ in KINDS))
    hooks = hooks_of_every_kind(action="modify", vector="vector.npy", **fields)
    _, copies = copies_by_step(model, hooks, lambda: [torch.empty(3, 4, device="meta", requires_grad=True)])
    assert len(copies[0]) >= len(KINDS)
    assert copies[1] == []


BIG = 1_000_000


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool],
    ids=str,
)
def test_launches_and_bytes_of_the_portable_sums(dtype: torch.dtype) -> None:
    tensor = torch.ones(BIG, dtype=dtype)
    with Launches() as launches:
        portable_sums(tensor)
    assert launches.count <= 39
    assert launches.bytes / BIG <= 218 + tensor.element_size() + 0.1  # about 27 reads or writes of a float64 copy


@pytest.mark.parametrize(
    ("measure", "most_launches", "most_bytes"),
    [
        (measure, 42, 222.1),
        (lambda x: dead_units(x, 1).sum(), 4, 13.0),
        (lambda x: count_saturated(x, (-1.0, 1.0)), 11, 37.1),
        (lambda x: row_sums(x, None, None), 26, 43.1),
        (lambda x: count_changed(x, x + 1), 11, 40.0),
        (lambda x: distribution.distribution_on_device(x.view(-1), (0.5,), 0), 28, 5.0),
    ],
    ids=["l2", "dead_fraction", "saturated_fraction", "row_entropy", "changed elements", "quantiles"],
)
def test_launches_and_bytes_of_other_numbers(measure: Any, most_launches: int, most_bytes: float) -> None:
    tensor = torch.ones(BIG // 10, 10, device="meta")
    measure(tensor)  # constants are created once
    with Launches() as launches:
        measure(tensor)
    assert launches.count <= most_launches
    assert launches.bytes / BIG <= most_bytes
