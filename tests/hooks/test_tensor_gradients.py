"""full_backward kinds, implemented by tensor hooks, compared with PyTorch's module hooks on an out-of-place copy."""

from __future__ import annotations

import copy
import gc
import resource
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hook_runs import Calls, assert_equal, counts, gradients, keep, record, run_step, run_steps, scale, tensors_by
from torch import Tensor, nn

import instrument
from instrument.hooks.tensor_gradients import OutputGradients
from instrument.stats.cpu_kernel import is_connected

Gradients = dict[tuple[str, str], Tensor]

RECORDS = {
    "grad_input": keep("full_backward", "**"),
    "grad_output": keep("full_backward", "**", role="grad_output"),
    "on_the_way_in": keep("full_backward_pre", "**"),
}


class Residual(nn.Module):
    """A module whose input is also used elsewhere, and whose output is added to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm, self.inplace = nn.BatchNorm2d(3), True

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        if not self.inplace:
            return out + x
        out += x
        return out


def first_columns() -> nn.Module:
    """Return a module that returns a view of a slice of its input."""
    return Calls(lambda x: x[:, :2])


class DenseLayer(nn.Module):
    """In-place operation first, as in a DenseNet; the input is concatenated to the output."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv = nn.Conv2d(channels, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.conv(self.relu(self.norm(x)))], 1)


def in_place_first() -> nn.Module:
    return nn.Sequential(nn.ReLU(inplace=True), nn.Conv2d(3, 3, 1))


def small_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(16, 8, 2, 2, 16, 32, num_classes=10)
    nn.init.normal_(model.heads.head.weight)  # initialised with zeros, which would make every gradient before it zero
    return model


def in_place(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 3, 1), *layers)


CASES: dict[str, Callable[[], nn.Module]] = {
    "vit": small_vit,
    "dense": lambda: nn.Sequential(DenseLayer(3), DenseLayer(5), nn.Conv2d(7, 3, 1)),
    "residual": lambda: in_place(Residual(), nn.ReLU(inplace=True)),
    "in place first in a block": lambda: in_place(in_place_first(), in_place_first()),
    "identity before in place": lambda: in_place(nn.Identity(), nn.ReLU(inplace=True), nn.Conv2d(3, 3, 1)),
    "view before in place": lambda: in_place(nn.Flatten(), nn.ReLU(inplace=True), nn.Linear(192, 3)),
    "nested identities": lambda: in_place(nn.Sequential(nn.Identity(), nn.Identity()), nn.ReLU6(inplace=True)),
    "dropout in place": lambda: in_place(nn.Dropout(0.5, inplace=True), nn.Tanh()),
}


def out_of_place(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(getattr(module, "inplace", None), bool):
            module.inplace = False
    return model


def call_loss(model: nn.Module, batch: Tensor) -> Tensor:
    torch.manual_seed(5)  # for dropout
    output = model(batch)
    return (output * torch.linspace(-1, 2, output.numel()).view_as(output)).sum()


def gradients_from_pytorch(model: nn.Module, batch: Tensor) -> dict[str, Gradients]:
    """Return what PyTorch's full backward hooks see, by hook of `RECORDS`, and by layer and call."""
    seen: dict[str, Gradients] = {hook: {} for hook in RECORDS}
    calls: Counter[tuple[str, str]] = Counter()

    def see(hook: str, name: str, found: Any) -> None:
        calls[hook, name] += 1
        for i, gradient in enumerate(found):
            if gradient is not None:
                seen[hook][name, f"{calls[hook, name]}.{i}"] = gradient.detach().clone()

    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            continue  # they split query, key and value where these are one tensor, which changes the rounding

        def after(_: nn.Module, into: Any, out: Any, name: str = name) -> None:
            see("grad_input", name, into)
            see("grad_output", name, out)

        module.register_full_backward_pre_hook(lambda m, out, name=name: see("on_the_way_in", name, out))
        module.register_full_backward_hook(after)
    call_loss(model, batch).backward()
    return seen


def gradients_from_records(model: nn.Module, batch: Tensor) -> tuple[dict[str, Gradients], instrument.Probe]:
    """Return the same from recorded tensors; calls are counted in the order of PyTorch's hooks, last call first."""
    probe = run_steps(model, RECORDS, lambda: call_loss(model, batch).backward())
    seen: dict[str, Gradients] = {name: {} for name in RECORDS}
    rows = [row for row in probe.sink.records("tensors") if row["module_type"] != "MultiheadAttention"]
    last = {row["layer"]: max(r["call"] for r in rows if r["layer"] == row["layer"]) for row in rows}
    for row in rows:
        nth = last[row["layer"]] - row["call"] + 1
        seen[row["hook"]][row["layer"], f"{nth}.{row['path'] or 0}"] = row["values"]
    return seen, probe


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_bit_identical_to_pytorch_module_hooks(name: str) -> None:
    torch.manual_seed(0)
    model = CASES[name]()
    reference = out_of_place(copy.deepcopy(model))
    batch = torch.randn((2, 3, 16, 16) if name == "vit" else (2, 3, 8, 8), requires_grad=True)
    wanted = gradients_from_pytorch(reference, batch)
    recorded, probe = gradients_from_records(model, batch.detach().clone().requires_grad_())
    for hook, found in recorded.items():
        assert found.keys() == wanted[hook].keys(), hook
        assert all(torch.equal(gradient, wanted[hook][key]) for key, gradient in found.items()), hook
    silent = [row["layer"] for row in probe.coverage() if row["fired"] != row["expected"]]
    assert all(layer.endswith("out_proj") for layer in silent), "attention never calls its output projection"
    for (where, parameter), same in zip(model.named_parameters(), reference.parameters(), strict=True):
        if parameter.grad is not None:
            assert torch.equal(parameter.grad, same.grad), where


def test_grad_input_is_of_the_module_and_tensor_is_the_total() -> None:
    model = Calls(lambda one, two, x: one(x) + 2 * two(x), one=nn.Linear(3, 3), two=nn.Linear(3, 3))
    batch = torch.randn(2, 3, requires_grad=True)
    specs = {"share": keep("full_backward", "*"), "total": keep("tensor", "*", role="input")}
    _, probe = run_step(model, specs, batch * 1.0, loss=torch.sum)
    seen = tensors_by(probe, "hook", "layer")
    ones = torch.ones(2, 3)
    assert torch.equal(seen["share", "one"], ones @ model.one.weight)
    assert torch.equal(seen["share", "two"], 2 * ones @ model.two.weight)
    for layer in ("one", "two"):
        assert torch.equal(seen["total", layer], batch.grad)


@pytest.mark.parametrize("split", [lambda x: x.chunk(2, -1), lambda x: torch.var_mean(x, -1)], ids=["views", "moments"])
def test_grad_input_of_a_module_with_several_outputs_of_one_operation(split: Any) -> None:
    total = lambda linear, split, x: sum(each.exp().sum() for each in split(linear(x)))  # noqa: E731
    model = Calls(total, linear=nn.Linear(4, 4), split=Calls(split))
    batch = torch.randn(2, 4)
    _, probe = run_step(model, {"share": RECORDS["grad_input"]}, batch, loss=torch.sum)
    given = model.linear(batch).detach().requires_grad_()
    sum(each.exp().sum() for each in split(given)).backward()
    torch.testing.assert_close(tensors_by(probe, "layer")["split"], given.grad)


def returns_input(inner: nn.Module) -> nn.Module:
    """Return a model with a module that returns its input, which is also used next to it."""

    def forward(linear: nn.Module, inner: nn.Module, x: Tensor) -> Tensor:
        hidden = linear(x)
        first = hidden * 0.3
        same = inner(hidden)
        return first + same.sin() + 3 * hidden + same.exp()

    return Calls(forward, linear=nn.Linear(64, 64), inner=inner)


PASS_THROUGH = pytest.mark.parametrize(
    "inner", [nn.Identity(), nn.Dropout(0.5, inplace=True).eval(), nn.Dropout().eval()], ids=str
)


@pytest.mark.spread(2)
@PASS_THROUGH
def test_recording_a_module_that_returns_its_input_is_neutral(inner: nn.Module) -> None:
    torch.manual_seed(0)
    model = returns_input(inner)
    batch = torch.randn(32, 64)
    baseline = copy.deepcopy(model)
    baseline(batch).sum().backward()
    _, probe = run_step(model, RECORDS, batch, loss=torch.sum)
    assert_equal(gradients(model), gradients(baseline))
    rows = tensors_by(probe, "hook", "layer")
    full = rows["grad_output", "linear"]
    for hook in RECORDS:
        assert torch.equal(rows[hook, "inner"], full), "one tensor has one gradient"


@pytest.mark.spread(3)
@PASS_THROUGH
@pytest.mark.parametrize("kind", ["full_backward_pre", "full_backward"])
def test_intervention_on_a_module_that_returns_its_input(inner: nn.Module, kind: str) -> None:
    model = returns_input(inner)
    batch = torch.randn(2, 64)
    run_step(model, {"h": scale(kind, 5.0, "inner")}, batch, loss=torch.sum)
    hidden = model.linear(batch).detach().requires_grad_()
    (hidden * 0.3 + 5 * hidden.sin() + 3 * hidden + 5 * hidden.exp()).sum().backward()
    assert torch.allclose(model.linear.bias.grad, hidden.grad.sum(0), rtol=1e-5)


def test_outer_and_later_modules_have_the_gradient_before_the_intervention() -> None:
    model, batch = nn.Sequential(nn.Sequential(nn.Linear(4, 4)), nn.Identity()), torch.randn(2, 4)
    specs = {
        "scaled": scale("full_backward_pre", 0.5, "0.0"),
        "seen": keep("full_backward_pre", ["0", "0.0", "1"]),
    }
    _, probe = run_step(model, specs, batch, loss=torch.sum)
    found = tensors_by(probe, "layer")
    assert {layer: float(gradient.unique()) for layer, gradient in found.items()} == {"1": 1.0, "0": 1.0, "0.0": 0.5}


@pytest.mark.parametrize(
    "view", [lambda x: x.view(2, 8), lambda x: x[:, :5], lambda x: x.t()], ids=["all", "part", "turned"]
)
def test_grad_input_of_a_module_that_writes_to_a_view(view: Any) -> None:
    def write(x: Tensor) -> Tensor:
        y = x * 2.0
        x.mul_(3.0)
        return y.sum() + (x * x).sum()

    def forward(linear: nn.Module, writing: nn.Module, x: Tensor) -> Tensor:
        hidden = linear(x)
        before = hidden * 0.5
        return writing(view(hidden)) + before.sum()

    model = Calls(forward, linear=nn.Linear(4, 8), writing=Calls(write))
    batch = torch.randn(2, 4)
    baseline = copy.deepcopy(model)
    baseline(batch).backward()
    _, probe = run_step(model, {"share": RECORDS["grad_input"]}, batch, loss=torch.sum)
    given = view(model.linear(batch)).detach().requires_grad_()
    (2 * given + (3 * given).square()).sum().backward()
    assert torch.allclose(tensors_by(probe, "layer")["writing"], given.grad, rtol=1e-6)
    assert_equal(gradients(model), gradients(baseline))


@pytest.mark.spread(6)
@pytest.mark.parametrize("kind", ["full_backward_pre", "full_backward", "tensor"])
@pytest.mark.parametrize(
    "between", [nn.Identity, nn.Flatten, first_columns], ids=["identity", "flatten", "part of a tensor"]
)
def test_gradient_is_changed_where_a_view_is_written_in_place(kind: str, between: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), between(), nn.ReLU(inplace=True))
    plain = out_of_place(copy.deepcopy(model))
    batch = torch.randn(3, 4)
    _, probe = run_step(model, {"h": scale(kind, 3.0, "1")}, batch, loss=torch.sum)
    plain(batch).sum().backward()
    assert len(probe.sink.rows["effects"]) == 1
    assert plain[0].weight.grad.any()
    torch.testing.assert_close(model[0].weight.grad, 3 * plain[0].weight.grad)


def last_columns() -> nn.Module:
    return Calls(lambda x: x[:, 2:])


def last_rows() -> nn.Module:
    """Return a module that returns all rows of its input but the first one: a contiguous view."""
    return Calls(lambda x: x[1:])


def test_view_hook_fires_once_after_a_write_to_its_base() -> None:
    view, x = first_columns(), torch.ones(2, 4, requires_grad=True)
    with instrument.attach(view, {"h": scale("tensor", 3.0)}) as probe:
        full = x * 1.0
        used = view(full) * 1.0
        full += 1.0  # the memory of the view changes after the view was used
        (used.sum() + full[:, 2:].sum()).backward()
        probe.end_step()
    assert x.grad.tolist() == [[3.0, 3.0, 1.0, 1.0]] * 2
    assert len(probe.sink.rows["effects"]) == 1


def test_grad_output_of_a_view_excludes_the_rest_of_the_tensor() -> None:
    model = nn.Sequential(nn.Linear(4, 4), last_columns(), nn.ReLU(inplace=True))
    hooks = {"h": {**RECORDS["grad_output"], "layers": "1"}}
    weights = torch.arange(6.0).view(3, 2)
    output, probe = run_step(model, hooks, torch.randn(3, 4), loss=lambda output: (output * weights).sum())
    (row,) = probe.sink.records("tensors")
    assert torch.equal(row["values"], weights * (output > 0))


@pytest.mark.spread(4)
@pytest.mark.parametrize("kind", ["full_backward", "tensor"])
@pytest.mark.parametrize("written", [True, False], ids=["written in place", "only read"])
@pytest.mark.parametrize("between", [last_columns, last_rows, nn.Flatten], ids=["columns", "rows", "all"])
def test_gradient_statistics_of_a_view_cover_only_the_view(between: Any, written: bool, kind: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), between(), nn.ReLU(inplace=written))
    weights = torch.arange(1.0, 13).view(3, 4)
    batch = torch.randn(3, 4)
    role = {} if kind == "tensor" else {"role": "grad_output"}
    used = weights[: len(between()(batch)), : between()(batch).shape[1]]
    hooks = {"h": record(kind, "1", **role, stats=["l1", "numel"])}
    output, probe = run_step(model, hooks, batch, loss=lambda output: (output * used).sum())
    expected = (used * (output > 0)).sum().item()
    assert [(row["l1"], row["numel"]) for row in probe.sink.records("stats")] == [(expected, output.numel())]
    assert counts(probe) == [(1, 1)]


@pytest.mark.parametrize("written", [True, False], ids=["written in place", "only read"])
def test_each_backward_pass_through_a_view_is_recorded(written: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=written))
    with instrument.attach(model, {"h": record("tensor", "0", stats=["l1"])}) as probe:
        output = model(torch.randn(2, 3, 4))
        for factor in range(1, 4):
            (factor * output[0]).sum().backward(retain_graph=True)
        probe.end_step()
    positive = (output[0] > 0).sum().item()
    found = {row["backward"]: row["l1"] for row in probe.sink.records("stats")}
    assert found == {0: positive, 1: 2 * positive, 2: 3 * positive}


@pytest.mark.spread(2)
@pytest.mark.parametrize("stats", [["l1"], ["l1", "skewness"]], ids=["C", "Python"])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, 0, 1, 1)], ids=str)
def test_passes_before_and_after_a_write_to_a_view_are_recorded(order: tuple[int, ...], stats: list[str]) -> None:
    """Each pass reaches the view either as it was before the write, or after it."""
    view, x = nn.Flatten(), torch.randn(2, 2, 3, requires_grad=True)
    with instrument.attach(view, {"h": record("tensor", stats=stats)}) as probe:
        y = view(x * 1.0)
        before = 2 * y
        y += 1.0
        for at in order:
            (before, 5 * y)[at].sum().backward(retain_graph=True)
        probe.end_step()
    expected = [(number, x.numel() * (2.0, 5.0)[at]) for number, at in enumerate(order)]
    assert sorted((row["backward"], row["l1"]) for row in probe.sink.records("stats")) == expected


@pytest.mark.spread(2)
@pytest.mark.parametrize("view", [last_columns(), last_rows()], ids=["columns", "rows"])
@pytest.mark.parametrize(
    ("is_used", "count"), [(True, 1), (False, 0)], ids=["read before a write to its base", "not used"]
)
def test_gradient_of_a_view_is_recorded_once_or_not_at_all(view: nn.Module, is_used: bool, count: int) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    with instrument.attach(view, {"h": record("tensor", stats=["l1"])}) as probe:
        full = x * 1.0
        used = view(full) * 1.0
        if is_used:
            full += 1.0
            (used.sum() + full[:1, :2].sum()).backward()
        else:
            full[:1, :2].sum().backward()
        probe.end_step()
    assert [row["l1"] for row in probe.sink.records("stats")] == [4.0] * count
    assert counts(probe) == [(1, count)]


@pytest.mark.skipif(not is_connected, reason="without the compiled kernel, all calls need Python code")
def test_calls_that_return_views_need_no_python_code(monkeypatch: pytest.MonkeyPatch) -> None:
    # A linear layer returns a view of a matrix.
    model, batch = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), torch.randn(2, 3, 4)
    assert model[0](batch)._base is not None
    monkeypatch.setattr(OutputGradients, "register", None)
    specs = {kind: record(kind, "*", stats=["l1"]) for kind in ("forward", "tensor")}
    output, probe = run_step(model, specs, batch, loss=torch.sum)
    found = {(row["layer"], row["kind"]): row["l1"] for row in probe.sink.records("stats")}
    assert found["1", "tensor"] == output.numel()
    assert found["0", "tensor"] == pytest.approx((1 - output**2).sum().item(), rel=1e-6)


def prompt() -> nn.Module:
    """Return a model that passes a parameter to a module, and has a module that returns its parameter."""
    give = Calls(lambda weight: weight, weight=nn.Parameter(torch.ones(3)))
    parts = {"prompt": nn.Parameter(torch.ones(3)), "give": give, "head": nn.Linear(3, 1)}
    return Calls(lambda prompt, give, head: head(prompt) + give().sum(), **parts)


@pytest.mark.spread(2)
@pytest.mark.parametrize(
    ("spec", "of"),
    [
        ({"layers": "head", "kind": "tensor", "role": "input"}, "prompt"),
        ({"layers": "head", "kind": "full_backward"}, "prompt"),
        ({"layers": "give", "kind": "tensor"}, "give.weight"),
        ({"layers": "give", "kind": "full_backward_pre"}, "give.weight"),
    ],
    ids=str,
)
def test_parameter_passed_through_modules_is_hooked_each_step(spec: dict[str, Any], of: str) -> None:
    model = prompt()
    hook = {**spec, "action": "scale", "factor": 4.0, "stop": 3}
    wanted = 4 * model.head.weight.detach().view(-1) if of == "prompt" else torch.full((3,), 4.0)
    with instrument.attach(model, {"h": hook}) as probe:
        for step in range(5):
            model.zero_grad()
            model().backward()
            gradient = model.get_parameter(of).grad
            assert torch.equal(gradient, wanted if step < 3 else wanted / 4)
            probe.end_step()
        assert [row["step"] for row in probe.sink.records("effects")] == [0, 1, 2]
    assert not model.get_parameter(of)._backward_hooks


def test_two_passes_in_one_step_do_not_share_leaf_hooks() -> None:
    model, spec = prompt(), scale("tensor", 3.0, "head", role="input")
    with instrument.attach(model, {"h": spec}) as probe:
        for _ in range(2):
            model().backward()
        probe.end_step()
    assert torch.allclose(model.prompt.grad, 2 * 3 * model.head.weight.view(-1))
    assert [row["call"] for row in probe.sink.records("effects")] == [0, 1]


@pytest.mark.parametrize("path", [None, "0", "1"])
def test_tensor_at_two_paths_has_its_gradient_changed_once(path: str | None) -> None:
    x = torch.ones(2, requires_grad=True)
    pair = Calls(lambda a: (total := a + a, total))
    hook = scale("full_backward_pre", 3.0, path=path)
    (left, right), probe = run_step(pair, {"h": hook}, x * 1.0, loss=lambda both: (both[0] + both[1]).sum())
    assert left is right
    assert x.grad.tolist() == [12.0, 12.0]  # 2 uses of 2 outputs, times 3
    assert [row["path"] for row in probe.sink.records("effects")] == [path or "0"]


class Leaky(nn.Module):
    """A model with every way in which a hook could keep alive the graph that holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(256, 256), nn.Identity(), nn.ReLU(inplace=True), nn.Linear(256, 256), nn.Unflatten(1, (16, 16))
        )
        self.view = nn.Sequential(nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(256, 256), first_columns())
        self.tail = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.view(self.body(x)))


EVERY_GRADIENT = {
    **RECORDS,
    "total": {**RECORDS["grad_input"], "kind": "tensor", "role": "input"},
    "output": {**RECORDS["grad_input"], "kind": "tensor"},
    "penalty": {"layers": "**", "kind": "tensor", "action": "modify", "fn": "l2", "coefficient": 0.1},
}


@pytest.mark.spread(1)
@pytest.mark.parametrize("backward", [True, False], ids=["backward", "no backward"])
def test_graph_with_gradient_hooks_is_freed_immediately(backward: bool) -> None:
    model = Leaky()
    seen: list[Any] = []
    layers = [model.body[0], model.body[1], model.body[4], model.view[0]]
    for layer in layers:
        layer.register_forward_hook(lambda module, args, output: seen.append(weakref.ref(output)))
    with instrument.attach(model, EVERY_GRADIENT) as probe:
        gc.disable()
        try:
            loss = model(torch.randn(4, 256, requires_grad=True)).sum()
            if backward:
                loss.backward()
            del loss
            assert len(seen) == 4
            assert all(ref() is None for ref in seen)
        finally:
            gc.enable()
        probe.end_step()


@pytest.mark.slow
def test_memory_stays_constant_over_many_steps() -> None:
    class Drop(instrument.MemorySink):
        def write(self, table: str, rows: Any) -> None:
            pass

        def keep(self, *tensor: Any) -> bool:
            return True

    model = Leaky()
    with instrument.attach(model, EVERY_GRADIENT) as probe:
        probe.sink = probe.recorder.sink = Drop()
        batch = torch.randn(256, 256, requires_grad=True)  # a step's activations are 256 kB each
        gc.disable()
        try:
            for step in range(220):
                model(batch).sum().backward()
                probe.end_step()
                if step == 40:
                    warm = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        finally:
            gc.enable()
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - warm
    assert grown < 20_000, f"{grown} kB more after 180 steps; one tensor of each step would be 46,000"
