"""Kinds function and function_grad: which calls are seen, their paths, interventions, coverage, and other modes."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import hook_runs
import pytest
import torch
import torch.nn.functional as F
from device_statistics import use_general_path
from hook_runs import Calls, assert_equal, gradients, keep, run_step
from torch import Tensor, nn
from torch.overrides import (
    TorchFunctionMode,
    _get_current_function_mode_stack,
    handle_torch_function,
    has_torch_function,
)
from torch.utils.checkpoint import checkpoint

import instrument
from instrument.hooks.clock import FIRST_CALL
from instrument.hooks.functions import FunctionHooks, HookedModule
from instrument.stats.cpu_kernel import is_connected
from instrument.tables.reasons import (
    AT_OTHER_STEPS,
    COMPILED,
    NO_FUNCTION,
    NO_INPUT_GRAPH,
    NO_TENSOR,
    NOT_CALLED,
    ONLY_IN_OTHER_MODULES,
    RAISED,
    TRANSFORMED,
)

FUNCTION: dict[str, Any] = {"layers": "**", "kind": "function", "functions": "*", "action": "record"}


class Attention(nn.Module):
    """Attention in plain PyTorch; it keeps its probabilities."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2) / x.shape[-1] ** 0.5
        self.probabilities = F.softmax(scores, dim=-1)
        return self.probabilities @ self.value(x)


class Block(nn.Module):
    """A residual block. `scale` multiplies the branch of the attention."""

    scale: float | None = None

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.attention, self.mlp = Attention(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        branch = self.attention(x)
        x = x + (branch if self.scale is None else branch * self.scale)
        return x + torch.relu(self.mlp(x))


def record(functions: Any, layers: str = ".", **more: Any) -> dict[str, Any]:
    return keep("function", layers, functions=functions, **more)


def scale(functions: Any, factor: float = 0.0, layers: str = ".", **more: Any) -> dict[str, Any]:
    return hook_runs.scale("function", factor, layers, functions=functions, **more)


def run(model: nn.Module, specs: Any, *args: Any, backward: bool = False) -> tuple[Any, Any]:
    """Run one step of a model and return its output and the probe."""
    output, probe = run_step(model, specs, *args, loss=torch.sum if backward else None)
    assert _get_current_function_mode_stack() == []
    return output, probe


def recorded(probe: Any, hook: str = "h") -> dict[tuple[str, str], Tensor]:
    rows = [row for row in probe.sink.records("tensors") if row["hook"] == hook]
    return {(row["layer"], row["path"]): row["values"] for row in rows}


def causes(probe: Any) -> dict[str, str]:
    return {row["hook"]: row["cause"] for row in probe.sink.records("coverage")}


def test_recorded_attention_equals_the_computation_of_the_module() -> None:
    model = nn.Sequential(Attention(), Attention())
    _, probe = run(model, {"h": record("softmax", "*")}, torch.randn(2, 5, 8))
    seen = recorded(probe)
    assert seen.keys() == {("0", "softmax.0"), ("1", "softmax.0")}
    assert all(torch.equal(seen[name, "softmax.0"], model[int(name)].probabilities) for name in "01")
    assert causes(probe) == {"h": ""}


@pytest.mark.spread(4)
@pytest.mark.parametrize(
    ("function", "paths"),
    [
        (lambda x: x + 1 + x, ["add.0", "add.1"]),
        (lambda x: 1 - x, ["__rsub__.0"]),
        (lambda x: 2**x + x**2, ["__rpow__.0", "pow.0", "add.0"]),
        (lambda x: -x @ x.T, ["neg.0", "matmul.0"]),
        (
            lambda x: torch.stack([F.relu(each) for each in x.unbind()]),
            ["unbind.0.0", "unbind.0.1", "relu.0", "relu.1", "stack.0"],
        ),
        (lambda x: x.chunk(2)[1], ["chunk.0.0", "chunk.0.1"]),
        (lambda x: x.topk(1).values, ["topk.0.0", "topk.0.1"]),
        (lambda x: x.max(1)[0], ["max.0.0", "max.0.1"]),
        (lambda x: torch.empty_like(x).copy_(x), ["copy_.0"]),
        (lambda x: x.dim() + x.size(0) + len(x) + x.sum(), ["sum.0", "add.0"]),
        (torch.ops.aten.relu.default, ["relu.0"]),
        (lambda x: F.max_pool1d(x, 2), ["max_pool1d.0"]),
        (lambda x: torch.special.softmax(x, 0), ["special_softmax.0"]),
    ],
)
def test_paths_number_the_calls_of_each_function(function: Callable[..., Any], paths: list[str]) -> None:
    _, probe = run(Calls(function), {"h": record("*")}, torch.randn(2, 4))
    assert [row["path"] for row in probe.sink.records("tensors")] == paths


def test_arguments_are_recorded_with_their_positions_and_names() -> None:
    linear, x = nn.Linear(3, 4), torch.randn(2, 3)
    softmax = lambda linear, x: torch.softmax(input=F.linear(x, linear.weight, linear.bias), dim=-1)  # noqa: E731
    function = lambda linear, x: torch.cat([softmax(linear, x), x], 1)  # noqa: E731
    _, probe = run(Calls(function, linear=linear), {"h": record(["linear", "softmax", "cat"], role="input")}, x)
    seen = {path: values for (_, path), values in recorded(probe).items()}
    assert [*seen] == ["linear.0.0", "linear.0.1", "linear.0.2", "softmax.0.input", "cat.0.0.0", "cat.0.0.1"]
    assert torch.equal(seen["linear.0.1"], linear.weight)
    assert torch.equal(seen["cat.0.0.1"], x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_plain_and_general_records_have_the_same_rows(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    spec = {**record("*", "**", stats="all", tensors=False), "role": "output"}
    model = nn.Sequential(Calls(lambda x: x.chunk(2)[0].neg() + x.new_ones(3, dtype=torch.int64).sum()), nn.Identity())
    x = torch.arange(12).view(4, 3).to(dtype)
    rows = []
    for is_general in (False, True):
        if is_general:
            use_general_path(monkeypatch)
        _, probe = run(model, {"h": spec, "two": {**spec, "path": "chunk.0.1"}}, x)
        rows.append(probe.sink.records("stats"))
    paths = ["chunk.0.0", "chunk.0.1", "chunk.0.1", "neg.0", "new_ones.0", "sum.0", "add.0"]
    assert [row["path"] for row in rows[0]] == paths
    assert repr(rows[0]) == repr(rows[1])


def nested(inner: nn.Module, x: Tensor) -> Tensor:
    """Call a module twice, and functions whose results are tuples, in place, `out`, without a result or of 0 dimensions."""
    y = inner(inner(x).add_(1))
    y[0] = torch.add(y[1].detach(), 1, out=torch.empty(4))
    with suppress(RuntimeError):
        torch.relu(torch.ones(2, dtype=torch.bool))
    return y.chunk(2)[0].relu() * F.relu(y, inplace=False).sum()


def recursive(inner: nn.Module, x: Tensor) -> Tensor:
    """Call a module inside itself, and end one of its calls with an exception."""
    if x.sum() > 5:
        raise ValueError
    try:
        return inner(x + 1)
    except ValueError:
        return x.relu()


def other_mode(inner: nn.Module, x: Tensor) -> Tensor:
    """Call a module while the mode of other code is active, and a function in a transform."""
    with Spy():
        x = inner(x).relu()
    return torch.func.vmap(torch.relu)(x)


@pytest.mark.skipif(not is_connected, reason="without the compiled kernel, no hook runs in C")
@pytest.mark.combinations(2)
@pytest.mark.parametrize("function", [nested, recursive, other_mode])
@pytest.mark.parametrize("context", [nullcontext, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("segments", [False, True])
def test_c_and_python_code_record_the_same(
    monkeypatch: pytest.MonkeyPatch, function: Callable[..., Tensor], context: Callable[[], Any], segments: bool
) -> None:
    inner = Calls(lambda x: x.relu() + 1)
    model = Calls(function, inner=inner)
    if function is recursive:
        inner = model.inner = Calls(lambda x: recursive(model.inner, x))
    spec = {**FUNCTION, "stats": "all"}
    specs = {
        "all": spec,
        "relu": {**spec, "functions": "relu", "own": True},
        "outer": {**spec, "layers": "."},
        "forward": {"layers": "inner", "kind": "forward", "action": "record"},
        "grad": {**FUNCTION, "kind": "function_grad", "functions": "add"},
        "some": {**spec, "functions": "relu", "calls": "1"},
    }
    results = []
    for names in ([*specs], ["all"], ["relu", "outer"]):
        for in_c in (True, False):
            monkeypatch.setattr("instrument.hooks.functions.is_connected", in_c)
            x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_(context is nullcontext)
            hooks = {name: specs[name] for name in names}
            with warnings.catch_warnings(action="ignore"), context(), instrument.attach(model, hooks) as probe:
                for _ in range(3):
                    output = checkpoint(model, x, use_reentrant=False) if segments else model(x)
                    if output.requires_grad:
                        output.sum().backward()
                    probe.end_step()
                    assert _get_current_function_mode_stack() == []
            tables = [probe.sink.records(table) for table in ("stats", "coverage")]
            assert len(tables[0]) > 8
            results.append(repr(tables))
        assert results[-2] == results[-1]


@pytest.mark.skipif(not is_connected, reason="without the compiled kernel, no hook runs in C")
def test_plain_calls_run_two_functions_of_the_hooks() -> None:
    model, x = nn.Sequential(*(Calls(torch.relu) for _ in range(4))), torch.ones(2, 3, requires_grad=True)
    called: Counter[str] = Counter()

    def count(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and "/instrument/hooks/" in frame.f_code.co_filename:
            called[frame.f_code.co_name] += 1

    with instrument.attach(model, {"h": {**FUNCTION, "layers": "*", "functions": "relu"}}) as probe:
        for step in range(3):
            sys.setprofile(count if step == 2 else None)
            model(x)
            sys.setprofile(None)
            probe.end_step()
    assert called == {"before": 4, "after": 4}
    assert len(probe.sink.records("stats")) == 12


@pytest.mark.skipif(not is_connected, reason="without the compiled kernel, no hook runs in C")
def test_plain_calls_keep_no_objects(few_objects: None, tmp_path: Path) -> None:
    inner = nn.Sequential(Calls(lambda x: x.relu().chunk(2)[0] * 2), Calls(torch.neg))
    model, x = nn.Sequential(inner, inner), torch.ones(4, 3, requires_grad=True)
    specs = {"h": FUNCTION, "own": {**FUNCTION, "own": True}}
    counts = []
    with instrument.attach(model, specs, out=tmp_path / "run") as probe:
        groups = [
            each for each in gc.get_objects() if type(each) is FunctionHooks and each.module in [*model.modules()]
        ]
        mode = groups[0].threads.mode
        for step in range(100):
            with nullcontext() if step % 2 else torch.no_grad():
                model(x)
            probe.end_step()
            known = mode.known[torch.neg]
            kept = [x, torch.neg, mode, mode.observe, known, known.name, known.selections, *known.paths, FIRST_CALL]
            kept += [each for group in groups for each in (group, group.scheduled, group.plain_calls, group.clock)]
            if step % 40 == 39:
                gc.collect()
                counts.append([sys.getrefcount(each) for each in kept])
                assert not any(type(each) is HookedModule for each in gc.get_objects())
    assert counts[0] == counts[1]


def test_path_selects_one_call() -> None:
    specs = {"h": record("add", path="add.1"), "two": record("chunk", path="chunk.0.1")}
    _, probe = run(Calls(lambda x: (x + 1 + 2).chunk(2)[0]), specs, torch.zeros(4))
    assert [(row["path"], row["values"].tolist()) for row in probe.sink.records("tensors")] == [
        ("add.1", [3.0] * 4),
        ("chunk.0.1", [3.0] * 2),
    ]


def test_numbers_do_not_depend_on_other_specs() -> None:
    model = nn.Sequential(Calls(lambda x: F.relu(x + 1)), Calls(lambda x: F.relu(x + 2)))
    specs = {"h": record("add"), "all": record("*", "**"), "own": record("*", "1", own=True)}
    _, probe = run(model, specs, torch.zeros(2))
    assert [path for _, path in recorded(probe)] == ["add.0", "add.1"]
    assert [*recorded(probe, "all")] == [(i, path) for i in "01" for path in ("add.0", "relu.0")]
    assert [*recorded(probe, "own")] == [("1", "add.0"), ("1", "relu.0")]


def test_calls_belong_to_the_innermost_matched_module() -> None:
    inner = Calls(lambda x: x + 1)
    model = Calls(lambda inner, x: inner(F.relu(x)) + 2, inner=inner)
    specs = {"both": record("*", "**"), "outer": record("*"), "own": record("*", own=True)}
    _, probe = run(model, specs, torch.zeros(2))
    assert [*recorded(probe, "both")] == [("", "relu.0"), ("inner", "add.0"), ("", "add.0")]
    assert [*recorded(probe, "outer")] == [("", "relu.0"), ("", "add.0"), ("", "add.1")]
    assert [*recorded(probe, "own")] == [("", "relu.0"), ("", "add.0")]


def test_calls_of_a_module_in_one_step_have_their_number() -> None:
    inner = Calls(lambda x: x + 1)
    _, probe = run(Calls(lambda inner, x: inner(inner(x)), inner=inner), {"h": record("add", "inner")}, torch.zeros(1))
    rows = [(row["path"], row["call"], row["values"].item()) for row in probe.sink.records("tensors")]
    assert rows == [("add.0", 0, 1.0), ("add.0", 1, 2.0)]


def test_module_that_calls_itself_has_separate_numbers() -> None:
    def function(x: Tensor, depth: int) -> Tensor:
        return F.relu(model(x + 1, depth - 1)) if depth else x + 10

    model = Calls(function)
    _, probe = run(model, {"h": record("*")}, torch.zeros(1), 2)
    rows = [(row["path"], row["call"]) for row in probe.sink.records("tensors")]
    assert rows == [("add.0", 0), ("add.0", 1), ("add.0", 2), ("relu.0", 1), ("relu.0", 0)]


def test_operations_of_our_own_hooks_are_not_seen() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    specs = {
        "h": record("*"),
        "half": {"layers": "*", "kind": "forward", "action": "scale", "factor": 0.5},
        "norm": {"layers": "*", "kind": "forward_pre", "action": "clip", "norm": 1.0, "scope": "sample"},
        "seen": {"layers": "*", "kind": "forward", "action": "record", "stats": "all", "quantiles": True},
        "inside": {
            "layers": "0",
            "kind": "function",
            "functions": "linear",
            "action": "modify",
            "fn": "noise",
            "std": 1.0,
        },
    }
    other = {"other": {"layers": "*", "kind": "forward", "action": "scale", "factor": 0.5}, "too": scale("relu", 0.5)}
    with instrument.attach(model, other) as first:
        _, probe = run_step(model, specs, torch.randn(2, 3))
        first.end_step()
    assert [path for _, path in recorded(probe)] == ["linear.0", "relu.0"]


def test_operations_of_another_probe_are_not_seen() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True))
    with instrument.attach(model, {"h": record("*")}) as probe:
        inner = {"half": scale("*", 0.5), "mean": record("*", stats=["mean"], quantiles=True)}
        run_step(model, inner, torch.ones(1, 3))
        probe.end_step()
    assert [path for _, path in recorded(probe)] == ["linear.0", "relu.0"]


@pytest.mark.parametrize("inner", [FUNCTION, {**FUNCTION, "action": "scale", "factor": 0.5}])
@pytest.mark.parametrize("context", [nullcontext, torch.no_grad])
def test_checks_by_another_probe_are_not_seen(inner: dict[str, Any], context: Callable[[], Any]) -> None:
    model = nn.Sequential(Calls(lambda x: x.relu() + 1))
    with (
        instrument.attach(model, {"h": record("*", ".", role="input")}) as probe,
        instrument.attach(model, {"h": inner}),
    ):
        for _ in range(2):  # the functions are known in the second step
            with context():
                model(torch.ones(2, 3))
            probe.end_step()
    assert [path for _, path in recorded(probe)] == ["relu.0.0", "add.0.0"]


def test_mode_is_only_active_inside_of_scheduled_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.hooks.hook_group.has_compiled", lambda: False)  # other tests may compile code
    depths: list[int] = []

    def look(x: Tensor) -> Tensor:
        depths.append(len(_get_current_function_mode_stack()))
        return x + 1

    model = nn.Sequential(Calls(look), Calls(look))
    with instrument.attach(model, {"h": record("add", "1", steps=[0])}) as probe:
        for _ in range(2):
            model(torch.zeros(1))
            probe.end_step()
            depths.append(len(model[1]._forward_pre_hooks) + len(model[1]._forward_hooks))
    assert depths == [0, 1, 2, 0, 0, 0]  # the hooks are suspended at the first call in which none is scheduled
    assert not model[1]._forward_pre_hooks
    assert not model[1]._forward_hooks_always_called


class Unhashable:
    """A function that PyTorch cannot use as a key."""

    __hash__ = None  # type: ignore[assignment]
    __name__ = "unhashable"

    def __call__(self, x: Tensor) -> Tensor:
        if has_torch_function((x,)):
            return handle_torch_function(self, (x,), x)
        return x + 1


def test_functions_that_code_creates_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("instrument.plan.function_calls._MAX_FUNCTIONS", 3)
    known: list[int] = []

    def function(x: Tensor) -> Tensor:
        for _ in range(5):
            new = Unhashable()
            x = handle_torch_function(lambda y: y + 1, (x,), new(x))
            (mode,) = _get_current_function_mode_stack()
            known.append(len(mode.known))
        return x

    _, probe = run(Calls(function), {"h": record("*")}, torch.zeros(1))
    assert max(known) <= 3
    numbers = [(f"unhashable.{i}", f"<lambda>.{i}") for i in range(5)]
    assert [path for _, path in recorded(probe)] == [path for pair in numbers for path in pair]


def test_removed_residual_branch_equals_the_edited_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block())
    edited = copy.deepcopy(model)
    edited[1].scale = 0.0
    x = torch.randn(2, 5, 8)
    output, probe = run(model, {"h": scale("add", 0.0, "1", role="input", path="add.0.1")}, x, backward=True)
    wanted = edited(x)
    wanted.sum().backward()
    assert torch.equal(output, wanted)
    assert_equal(gradients(model), gradients(edited))
    (effect,) = probe.sink.records("effects")
    assert (effect["path"], effect["norm_after"]) == ("add.0.1", 0.0)


@pytest.mark.spread(6)
@pytest.mark.parametrize(
    ("function", "names", "wanted"),
    [
        (F.relu, "relu", lambda x: 3 * F.relu(x)),
        (lambda x: x.exp() * 2, "exp", lambda x: 3 * x.exp() * 2),
        (lambda x: x.chunk(2)[1].sin(), "chunk", lambda x: (3 * x.chunk(2)[1]).sin()),
        (lambda x: torch.cat(x.unbind()), "cat", lambda x: 3 * torch.cat(x.unbind())),
        (lambda x: x.topk(2).values, "topk", lambda x: 3 * x.topk(2).values),
        (lambda x: x.view(-1).sigmoid(), "view", lambda x: (3 * x).view(-1).sigmoid()),
        (lambda x: F.softmax(x, -1), "softmax", lambda x: 3 * F.softmax(x, -1)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_changed_result_has_the_gradient_of_the_changed_function(
    function: Callable[..., Tensor], names: str, wanted: Callable[..., Tensor]
) -> None:
    x = torch.randn(2, 4, dtype=torch.double, requires_grad=True)
    with instrument.attach(Calls(function), {"h": scale(names, 3.0)}) as probe:
        assert torch.autograd.gradcheck(probe.plan.layers.model, (x,))
        output = probe.plan.layers.model(x)
    (gradient,) = torch.autograd.grad(output.square().sum(), x)
    (right,) = torch.autograd.grad(wanted(x).square().sum(), x)
    assert torch.allclose(output, wanted(x))
    assert torch.allclose(gradient, right)


def in_place_add(x: Tensor) -> Tensor:
    y = x * 2
    alias = y
    y += 1
    return alias * y


def in_place_item(x: Tensor) -> Tensor:
    y = x * 2
    y[0] = x[1] * 5
    return y


def in_place_view(x: Tensor) -> Tensor:
    y = x * 2
    y[0].exp_()
    return y


@pytest.mark.parametrize(
    ("function", "names", "wanted"),
    [
        (in_place_add, "add_", lambda x: (3 * (2 * x + 1)).square()),
        (lambda x: (y := x * 2, y.sigmoid_(), y)[2], "sigmoid_", lambda x: 3 * (2 * x).sigmoid()),
        (lambda x: (y := x * 2, F.relu(y, True), y)[2], "relu", lambda x: 3 * (2 * x).relu()),
        (lambda x: (y := x * 2, F.elu(y, inplace=True), y)[2], "elu", lambda x: 3 * F.elu(2 * x)),
        (in_place_item, "__setitem__", lambda x: 3 * torch.stack([x[1] * 5, x[1] * 2])),
        (in_place_view, "exp_", lambda x: torch.stack([3 * (2 * x[0]).exp(), 2 * x[1]])),
        (lambda x: (y := x * 2, y.unsqueeze_(0), y)[2], "unsqueeze_", lambda x: 3 * (2 * x)[None]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_changed_in_place_function_changes_the_tensor_itself(
    function: Callable[..., Tensor], names: str, wanted: Callable[..., Tensor]
) -> None:
    x = torch.randn(2, 4, dtype=torch.double, requires_grad=True)
    model = Calls(function)
    with instrument.attach(model, {"h": scale(names, 3.0)}):
        assert torch.autograd.gradcheck(model, (x,))
        assert torch.allclose(model(x), wanted(x))
    _, probe = run(Calls(function), {"h": record(names)}, x)
    (values,) = recorded(probe).values()
    assert torch.equal(values.isnan(), torch.zeros_like(values, dtype=torch.bool))


def test_record_of_an_in_place_function_sees_its_result() -> None:
    specs = {"h": record(["add_", "__setitem__"]), "before": record("add_", role="input", path="add_.0.0")}
    _, probe = run(Calls(lambda x: (y := x * 2, y.add_(1), y.__setitem__(0, 7.0))[0]), specs, torch.ones(2))
    assert {path: values.tolist() for (_, path), values in recorded(probe).items()} == {
        "add_.0": [3.0, 3.0],
        "__setitem__.0": [7.0, 3.0],
    }
    assert recorded(probe, "before")["", "add_.0.0"].tolist() == [2.0, 2.0]


def test_changed_argument_of_an_in_place_function_changes_the_tensor() -> None:
    model = Calls(lambda x: (y := x * 2, y.add_(x), y)[2])
    for index, wanted in ((0, 3 * 2 + 1), (1, 2 + 3 * 1)):
        output, _ = run(model, {"h": scale("add_", 3.0, role="input", path=f"add_.0.{index}")}, torch.ones(2))
        assert output.tolist() == [wanted] * 2


def test_out_tensor_has_the_changed_value() -> None:
    buffer = torch.zeros(2)
    model = Calls(lambda x: (torch.add(x, x, out=buffer), buffer)[1])
    output, probe = run(model, {"change": scale("add", 3.0), "h": record("add")}, torch.ones(2))
    assert output is buffer
    assert buffer.tolist() == [6.0, 6.0]
    assert recorded(probe)["", "add.0"].tolist() == [6.0, 6.0]


def test_changed_view_leaves_its_base_unchanged() -> None:
    base = torch.ones(2, 2)
    output, _ = run(Calls(lambda x: x.view(-1)), {"h": scale("view", 3.0)}, base)
    assert output.tolist() == [3.0] * 4
    assert base.tolist() == [[1.0, 1.0]] * 2


def test_hooks_on_one_function_run_in_order() -> None:
    specs = {"a": record("add"), "double": scale("add", 2.0), "b": record("add"), "all": record("*", "**")}
    output, probe = run(Calls(lambda x: x + 1), specs, torch.ones(1))
    values = {hook: recorded(probe, hook)["", "add.0"].item() for hook in ("a", "b", "all")}
    assert (values, output.item()) == ({"a": 2.0, "b": 4.0, "all": 4.0}, 4.0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.softmax(x * 2, -1).square(),
        lambda x: F.relu(x * 2, True) * x,
        lambda x: torch.cat([part * i for i, part in enumerate((x * 2).chunk(2, 1), 2)], 1).exp(),
        lambda x: (y := x * 2, y[0].mul_(3.0), y.sin_())[2],
    ],
    ids=["softmax", "relu", "chunk", "in_place"],
)
def test_recorded_gradients_equal_those_of_tensor_hooks(function: Callable[..., Tensor]) -> None:
    wanted: dict[str, Tensor] = {}
    counts: dict[str, int] = {}

    class Hooks(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            name = func.__name__
            number = counts[name] = counts.get(name, -1) + 1
            for i, tensor in enumerate(result if isinstance(result, tuple) else [result]):
                path = f"{name}.{number}.{i}" if isinstance(result, tuple) else f"{name}.{number}"
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(lambda gradient, path=path: wanted.update({path: gradient.clone()}))
            return result

    x = torch.randn(4, 4, requires_grad=True)
    with Hooks():
        output = function(x)
    output.sum().backward()
    spec = {**record("*"), "kind": "function_grad"}
    y = x.detach().clone().requires_grad_()
    _, probe = run(Calls(function), {"h": spec}, y, backward=True)
    seen = {path: values for (_, path), values in recorded(probe).items()}
    assert {"mul.0"} <= seen.keys()
    assert {path: seen[path].tolist() for path in wanted} == {path: each.tolist() for path, each in wanted.items()}
    assert torch.equal(x.grad, y.grad)
    assert causes(probe) == {"h": ""}


@pytest.mark.parametrize("name", ["exp", "exp_"])
def test_changed_gradient_reaches_the_arguments(name: str) -> None:
    x = torch.randn(3, requires_grad=True)
    spec = {**scale(name, 3.0), "kind": "function_grad"}
    run(Calls(lambda x: getattr(x * 2, name)() * 5), {"h": spec}, x, backward=True)
    assert torch.allclose(x.grad, 3 * 2 * 5 * (2 * x).exp())


@pytest.mark.parametrize(
    "function", [torch.sin, torch.Tensor.sin_, lambda x: torch.sin(x).add_(1)], ids=["new", "in_place", "then_in_place"]
)
def test_gradient_hooks_act_in_the_written_order(function: Callable[..., Tensor]) -> None:
    on_gradient = {"kind": "function_grad"}
    specs = {
        "before": record("sin*") | on_gradient,
        "tripled": scale("sin*", 3.0) | on_gradient,
        "limited": {"layers": ".", "functions": "sin*", "action": "clip", "value": 2.0} | on_gradient,
        "after": record("sin*") | on_gradient,
    }
    x = torch.zeros(3, requires_grad=True)
    _, probe = run(Calls(lambda x: function(x * 1.0) * 1.0), specs, x, backward=True)
    found = [next(iter(recorded(probe, name).values())).unique().tolist() for name in ("before", "after")]
    assert (found, x.grad.unique().tolist()) == ([[1.0], [2.0]], [2.0])


def test_double_backward_is_recorded_and_changed() -> None:
    def penalty(model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return x.grad

    x = torch.randn(2, 3, dtype=torch.double)
    model = Calls(lambda x: x.sin().tanh())
    bare = penalty(model, x.clone().requires_grad_())
    with instrument.attach(model, {"h": {**record("sin"), "kind": "function_grad"}}) as probe:
        assert torch.equal(penalty(model, x.clone().requires_grad_()), bare)
        probe.end_step()
    assert [row["backward"] for row in probe.sink.records("tensors")] == [0, 1]

    class Tripled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * 3

    wanted = penalty(lambda x: Tripled.apply(x.tanh()).sin(), x.clone().requires_grad_())
    changed = Calls(lambda x: x.tanh().sin())
    with instrument.attach(changed, {"h": {**scale("tanh", 3.0), "kind": "function_grad"}}):
        assert torch.allclose(penalty(changed, x.clone().requires_grad_()), wanted)


def test_coverage_gives_the_cause() -> None:
    inner = Calls(lambda x: x + 1)
    model = Calls(lambda inner, x: inner(x) if x.sum() > 0 else x, inner=inner)
    specs = {
        "absent": record("softmax", "inner", stop=1),
        "elsewhere": record("add", "**", stop=1, own=True),
        "no_tensor": record("add", "inner", path="add.7", stop=1),
        "uncalled": record("add", "inner", start=2),
        "gradient": {**record("add", "inner"), "kind": "function_grad", "stop": 1},
        "absent_gradient": {**record("tanh", "inner"), "kind": "function_grad"},
        "fine": record("add", "inner", stop=1),
    }
    with pytest.warns(instrument.InstrumentWarning) as warned, instrument.attach(model, specs) as probe:
        for step in range(3):
            model(torch.ones(2) if step == 0 else -torch.ones(2))
            probe.end_step()
    found = {(row["hook"], row["layer"]): row for row in probe.sink.records("coverage")}
    counts = {
        # After a compilation in this process, the cause mentions compiled parts.
        key: (row["fired"], row["expected"], row["cause"].partition("; if a part of it is compiled")[0])
        for key, row in found.items()
    }
    assert counts == {
        ("absent", "inner"): (0, 0, NO_FUNCTION),
        ("elsewhere", ""): (0, 0, ONLY_IN_OTHER_MODULES),
        ("elsewhere", "inner"): (1, 1, ""),
        ("no_tensor", "inner"): (0, 1, NO_TENSOR),
        ("uncalled", "inner"): (0, 1, AT_OTHER_STEPS),
        ("gradient", "inner"): (0, 0, NO_INPUT_GRAPH),
        ("absent_gradient", "inner"): (0, 2, NOT_CALLED),
        ("fine", "inner"): (1, 1, ""),
    }
    messages = "".join(str(warning.message) for warning in warned)
    assert [hook for hook in specs if f"'{hook}'" in messages] == ["absent", "no_tensor", "uncalled", "absent_gradient"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_mode_is_left_after_an_exception(error: type[BaseException]) -> None:
    def fail(x: Tensor) -> Tensor:
        if x.sum() < 0:
            raise error("in forward")
        return x + 1

    model = nn.Sequential(Calls(lambda x: x + 0), Calls(fail))
    warned = pytest.warns(instrument.InstrumentWarning) if error is ValueError else nullcontext()
    with warned, instrument.attach(model, {"h": record("add", "**")}) as probe:
        with pytest.raises(error), Spy():
            model(-torch.ones(1))
        if error is ValueError:
            assert _get_current_function_mode_stack() == []
        model(torch.ones(1))
        assert _get_current_function_mode_stack() == []
        with pytest.raises(error), Spy():
            model(-torch.ones(1))
        probe.end_step()
        assert _get_current_function_mode_stack() == []
        with pytest.raises(error), Spy():
            model(-torch.ones(1))
    assert _get_current_function_mode_stack() == []
    rows = [(row["layer"], row["path"]) for row in probe.sink.records("tensors")]
    assert rows[:3] == [("0", "add.0"), ("0", "add.0"), ("1", "add.0")]
    if error is ValueError:
        assert RAISED in "".join(row["cause"] for row in probe.sink.records("coverage"))


def test_exception_of_an_action_names_the_function() -> None:
    def fail(tensor: Tensor, context: instrument.Context) -> Tensor:
        raise ValueError("no")

    spec = {"layers": ".", "kind": "function", "functions": "add", "action": "modify", "fn": fail}
    with pytest.raises(instrument.HookError, match=r"hook 'h' \(function\) on layer '.', output 'add.0'"):
        run_step(Calls(lambda x: x + 1), {"h": spec}, torch.ones(1))
    assert _get_current_function_mode_stack() == []


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation_repeats_interventions_and_records_once(reentrant: bool) -> None:
    inner = nn.Sequential(nn.Linear(4, 4), Calls(lambda x: F.relu(x + 1)), nn.Linear(4, 4))
    specs = {
        "h": record("*", "**"),
        "noise": {"layers": "1", "kind": "function", "functions": "add", "action": "modify", "fn": "noise", "std": 1.0},
        "gradient": {**record("relu", "1"), "kind": "function_grad"},
    }
    x = torch.randn(2, 4, requires_grad=True)
    results = []
    for segments in (False, True):
        model = copy.deepcopy(inner)
        x.grad = None
        with instrument.attach(model, specs) as probe:
            output = checkpoint(model, x, use_reentrant=reentrant) if segments else model(x)
            output.square().sum().backward()
            probe.end_step()
        rows = {hook: {key: each.tolist() for key, each in recorded(probe, hook).items()} for hook in ("h", "gradient")}
        assert len([row for row in probe.sink.records("tensors") if row["hook"] == "h"]) == 4
        results.append((output.tolist(), [p.grad.tolist() for p in model.parameters()], x.grad.tolist(), rows))
    assert results[0] == results[1]


def test_change_inside_a_segment_that_the_module_starts_is_refused() -> None:
    model = Calls(lambda x: checkpoint(lambda x: x.exp() + 1, x, use_reentrant=False))
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(instrument.HookError, match="activation checkpoint"):
        run_step(model, {"h": scale("exp")}, x)
    _, probe = run(model, {"h": record("*")}, x, backward=True)
    assert [path for _, path in recorded(probe)] == ["exp.0", "add.0"]


def test_autocast_results_have_the_dtype_of_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        output, probe = run(nn.Linear(3, 3), {"change": scale("linear", 2.0), "h": record("linear")}, torch.ones(1, 3))
    (row,) = probe.sink.records("tensors")
    assert (row["dtype"], output.dtype) == ("bfloat16", torch.bfloat16)
    assert torch.equal(row["values"], output)


def test_each_thread_has_its_own_calls() -> None:
    barrier = threading.Barrier(2)

    def function(x: Tensor) -> Tensor:
        x = x + 1
        barrier.wait(timeout=10)
        return F.relu(x + 2)

    model = Calls(function)
    with instrument.attach(model, {"h": record("*")}) as probe:
        replicas = [model._replicate_for_data_parallel() for _ in range(2)]  # type: ignore[no-untyped-call]
        threads = [threading.Thread(target=each, args=(torch.zeros(1),)) for each in replicas]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        probe.end_step()
    assert (
        sorted(row["path"] for row in probe.sink.records("tensors")) == ["add.0"] * 2 + ["add.1"] * 2 + ["relu.0"] * 2
    )


class Spy(TorchFunctionMode):
    """A mode of a user that lists functions."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("inside", [False, True])
def test_other_mode_works_at_the_same_time(inside: bool) -> None:
    spy = Spy()

    def function(x: Tensor) -> Tensor:
        if not inside:
            return F.relu(x + 1)
        with spy:
            return F.relu(x + 1)

    with instrument.attach(Calls(function), {"h": record("*")}) as probe:
        if inside:
            probe.plan.layers.model(torch.zeros(1))
        else:
            with spy:
                probe.plan.layers.model(torch.zeros(1))
        probe.end_step()
    assert [path for _, path in recorded(probe)] == ["add.0", "relu.0"]
    assert {"add", "relu"} <= set(spy.names)
    assert _get_current_function_mode_stack() == []


def test_mode_that_outlives_the_module_stays_active() -> None:
    spy = Spy()
    model = Calls(lambda x: (spy.__enter__(), x + 1)[1])
    with instrument.attach(model, {"h": record("add")}):
        model(torch.zeros(1))
        assert _get_current_function_mode_stack() == [spy]
        spy.__exit__(None, None, None)


def test_transforms_of_torch_func_are_not_entered() -> None:
    inner = Calls(lambda x: F.relu(x + 1))
    model = Calls(lambda inner, x: torch.func.vmap(inner)(x), inner=inner)
    with pytest.warns(instrument.InstrumentWarning, match="torch.func"):
        output, probe = run(model, {"h": record("*", "inner"), "outer": record("relu")}, torch.zeros(2))
    assert output.tolist() == [1.0, 1.0]
    assert causes(probe) == {"h": TRANSFORMED, "outer": TRANSFORMED}
    assert probe.sink.records("tensors") == []


@pytest.mark.slow
def test_compiled_module_is_reported() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    compiled = torch.compile(model, backend="eager")
    with (
        pytest.warns(instrument.InstrumentWarning, match="torch.compile"),
        instrument.attach(compiled, {"h": record("*", "**")}) as probe,
    ):
        for _ in range(2):
            output = compiled(torch.ones(1, 3))
            probe.end_step()
    assert torch.equal(output, model(torch.ones(1, 3)))
    assert set(causes(probe).values()) == {COMPILED}
    torch.compiler.reset()


class PaddedEncoder(nn.Module):
    """An encoder whose evaluation gives padded positions the values of PyTorch's nested tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8, padding_idx=0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.encoder(self.embed(tokens), src_key_padding_mask=tokens == 0)
        return self.head(hidden.mean(1))  # type: ignore[no-any-return]


@pytest.mark.spread(3)
@pytest.mark.parametrize("layers", ["**", ".", "encoder", "encoder.layers.*", "encoder.layers.*.self_attn", "head"])
@pytest.mark.parametrize("grad", [False, True])
def test_padded_encoder_computes_the_same(layers: str, grad: bool) -> None:
    torch.manual_seed(0)
    model = PaddedEncoder().eval().requires_grad_(grad)
    tokens = torch.tensor([[3, 4, 5, 0, 0], [6, 7, 0, 0, 0], [1, 2, 3, 4, 5]])
    with torch.set_grad_enabled(grad):
        baseline = model(tokens)
        output, probe = run(model, {"h": record("*", layers)}, tokens)
    assert torch.allclose(output, baseline, rtol=0, atol=1e-6)
    assert any(path.startswith("linear") for layer, path in recorded(probe) if layer == "head") == (
        layers in ("**", "head")
    )


def test_compiled_parts_of_a_module_are_left_out() -> None:
    compiled_gelu = torch.compile(lambda x: F.gelu(x) * 0.5, backend="eager", fullgraph=True)
    model = Calls(lambda linear, x: compiled_gelu(linear(x)) + x, linear=nn.Linear(4, 4))
    x = torch.randn(2, 4)
    expected = F.gelu(model.linear(x)) * 0.5 + x
    for _ in range(2):  # it compiles in the first pass
        output, probe = run(model, {"h": record("*"), "gelu": record("gelu")}, x)
        assert torch.equal(output, expected)
        assert [path for _, path in recorded(probe)] == ["linear.0", "add.0"]
        assert "compiled by torch.compile" in causes(probe)["gelu"]
    torch.compiler.reset()


@pytest.mark.slow
def test_branch_of_a_condition_is_left_out() -> None:
    double, negate = nn.Linear(4, 4), nn.Linear(4, 4)
    model = Calls(lambda a, b, x: torch.cond(x.sum() > 0, a, b, (x,)), a=double, b=negate)
    x = torch.ones(2, 4)
    with torch.no_grad():
        expected = double(x)
        output, probe = run(model, {"h": record("*")}, x)
    assert torch.equal(output, expected)
    assert [path for _, path in recorded(probe)] == ["sum.0", "gt.0"]
    torch.compiler.reset()


def test_attention_backends_and_python_functions_are_one_call() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 5, 8, requires_grad=True)
    _, probe = run(
        Calls(lambda attention, x: attention(x, x, x)[0], attention=attention), {"h": record("multi_head*")}, x
    )
    assert [path for _, path in recorded(probe)] == [f"multi_head_attention_forward.0.{i}" for i in range(2)]
    backends = torch.nn.attention.SDPBackend
    for backend in (backends.MATH, backends.FLASH_ATTENTION):
        with torch.nn.attention.sdpa_kernel(backend):
            model = Calls(lambda x: F.scaled_dot_product_attention(x, x, x))
            output, probe = run(model, {"h": record("scaled*")}, torch.randn(1, 2, 5, 8))
        assert torch.equal(recorded(probe)["", "scaled_dot_product_attention.0"], output)


def test_straight_through_passes_the_gradient_of_a_function() -> None:
    model, x = Calls(lambda x: x.mul(3.0)), torch.tensor([-2.0, 5.0], requires_grad=True)
    spec = {"layers": ".", "kind": "function", "functions": "mul", "action": "modify", "fn": "sign"}
    with instrument.attach(model, {"h": {**spec, "straight_through": True}}):
        output = model(x)
    output.sum().backward()
    assert output.tolist() == [-1.0, 1.0]
    assert x.grad.tolist() == [3.0, 3.0]
