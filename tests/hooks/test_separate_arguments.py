"""A tensor that a module gets as several arguments: each has its own gradient, as with PyTorch's full backward hook."""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hook_runs import Calls, assert_close, counts, gradients, keep, run_step, run_steps, scale, tensors_by
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import instrument

OWN = {"own": keep("full_backward", role="grad_input")}
INNER = {"own": keep("full_backward", "inner", role="grad_input")}


class Cache:
    """An object that a module writes to."""

    count = 0
    last: Any = None


class Weighted(nn.Module):
    """A sum of nested arguments with the weights 2, 3, 5, ... It has dropout, a buffer and attributes that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout, self.calls, self.seen = nn.Dropout(0.5), 0, []
        self.cache, self.generator, self.last = Cache(), torch.Generator().manual_seed(5), torch.zeros(())
        self.register_buffer("sum", torch.zeros(3))

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        parts: list[Tensor] = []

        def collect(value: Any) -> None:
            if isinstance(value, Tensor):
                parts.append(value)
            for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
                collect(item)

        collect([*args, kwargs])
        self.calls += 1
        self.seen.append(len(parts))
        with torch.no_grad():
            self.sum += parts[0].sum(0)
        weighted = [factor * part for factor, part in zip((2, 3, 5, 7, 11), parts, strict=False)]
        self.last = self.dropout(torch.stack(weighted).sum(0)) * self.calls  # a tensor of the graph
        self.cache.count += 1
        random = 1 + torch.randint(3, (), generator=self.generator)
        return self.last * self.cache.count * random if self.training else self.last


class Net(nn.Module):
    """Passes the output of a layer to a module in a given way, and uses it elsewhere too."""

    def __init__(self, inner: nn.Module, width: int, call: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.inner, self.call = nn.Linear(width, width), inner, call

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.layer(x)
        output = self.call(self.inner, hidden)
        outputs = output if isinstance(output, tuple) else (output,)
        return hidden.sin().sum() + sum(factor * part.square().sum() for factor, part in enumerate(outputs, 1))


def returns_parts() -> nn.Module:
    """Return a module whose first output is used in its second one, which it returns twice."""
    first, second = nn.Bilinear(3, 3, 3), nn.Bilinear(3, 3, 3)
    return Calls(lambda first, second, a, b: (y := first(a, b), z := second(y, a), z), first=first, second=second)


def attention() -> nn.Module:
    return nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[[nn.Module, Tensor], Any], list[str]]] = {
    "two": (Weighted, (2, 3), lambda m, h: m(h, h), ["0", "1"]),
    "three": (Weighted, (2, 3), lambda m, h: m(h, h, h), ["0", "1", "2"]),
    "another tensor between": (Weighted, (2, 3), lambda m, h: m(h, h.sin(), h), ["0", "1", "2"]),
    "two pairs": (Weighted, (2, 3), lambda m, h: m(h, g := h.sin(), h, g), ["0", "1", "2", "3"]),
    "a view": (Weighted, (2, 3), lambda m, h: m(v := h.view(2, 3), h, v), ["0", "1", "2"]),
    "bilinear": (lambda: nn.Bilinear(3, 3, 3), (2, 3), lambda m, h: m(h, h), ["0", "1"]),
    "outputs that depend on each other": (returns_parts, (2, 3), lambda m, h: m(h, h), ["0", "1"]),
    "attention": (attention, (2, 5, 4), lambda m, h: m(h, h, h), ["0", "1", "2"]),
    "attention to a memory": (attention, (2, 5, 4), lambda m, h: m(h, g := h.sin(), g), ["0", "1", "2"]),
}


def train(net: Net, shape: tuple[int, ...]) -> None:
    torch.manual_seed(3)
    net(torch.randn(shape, generator=torch.Generator().manual_seed(1))).backward()


def state_of(net: Net) -> list[Any]:
    random = torch.get_rng_state()
    inner = net.inner
    state = (
        [inner.calls, inner.seen, inner.cache.count, inner.generator.get_state()] if isinstance(inner, Weighted) else []
    )
    return [*(p.grad for p in net.parameters()), *net.buffers(), random, *state]


def equal(one: Any, other: Any) -> bool:
    return torch.equal(one, other) if isinstance(one, Tensor) else one == other


@pytest.mark.spread(2)
@pytest.mark.parametrize("name", CASES)
def test_records_equal_pytorch_hooks_and_change_nothing(name: str) -> None:
    make, shape, call, paths = CASES[name]
    torch.manual_seed(0)
    net = Net(make(), shape[-1], call).double()
    torch.set_default_dtype(torch.float64)
    try:
        reference, baseline = copy.deepcopy(net), copy.deepcopy(net)
        wanted: list[Tensor] = []
        reference.inner.register_full_backward_hook(lambda module, into, out: wanted.extend(into))
        train(reference, shape)
        train(baseline, shape)
        state = state_of(baseline)
        probe = run_steps(net, INNER, lambda: train(net, shape))
        assert all(map(equal, state_of(net), state))
    finally:
        torch.set_default_dtype(torch.float32)
    rows = tensors_by(probe, "path")
    assert sorted(rows) == paths
    assert_close([rows[path] for path in paths], wanted, rtol=1e-12, atol=1e-14)
    assert not probe.warnings


@pytest.mark.spread(3)
@pytest.mark.parametrize(
    ("call", "factors"),
    [
        (lambda m, h: m(h, b=h, c=h), {"0": 2, "b": 3, "c": 5}),
        (lambda m, h: m(a=h, b=h), {"a": 2, "b": 3}),
        (lambda m, h: m(h, [h, {"x": h}], (h,)), {"0": 2, "1.0": 3, "1.1.x": 5, "2.0": 7}),
    ],
    ids=["some by name", "all by name", "nested"],
)
@pytest.mark.parametrize("reentrant", [None, True, False], ids=["plain", "reentrant", "non-reentrant"])
def test_keyword_and_nested_arguments_have_their_own_gradients(
    call: Any, factors: dict[str, int], reentrant: bool | None
) -> None:
    """The gradient of a sum with weights is the weight. PyTorch's hook sees positional tensors only."""
    model, h = Weighted().eval(), torch.ones(2, 3, requires_grad=True)
    with instrument.attach(model, OWN) as probe:
        hidden = h * 1.0
        output = call(model, hidden) if reentrant is None else checkpoint(call, model, hidden, use_reentrant=reentrant)
        output.sum().backward()
        probe.end_step()
    rows = {path: set(values.flatten().tolist()) for path, values in tensors_by(probe, "path").items()}
    calls = 2.0 if reentrant else 1.0  # the module counts its calls
    assert rows == {path: {factor * calls} for path, factor in factors.items()}
    assert counts(probe) == [(1, 1)]


@pytest.mark.spread(3)
@pytest.mark.parametrize("path", ["0", "1", "2"])
@pytest.mark.parametrize("name", ["three", "attention"])
def test_intervention_changes_one_path(name: str, path: str) -> None:
    make, shape, call, _ = CASES[name]
    torch.manual_seed(0)
    net = Net(make(), shape[-1], call).double().eval()
    reference, x = copy.deepcopy(net), torch.randn(shape, dtype=torch.float64)
    reference.inner.register_full_backward_hook(
        lambda module, into, out: tuple(part * 4 if i == int(path) else part for i, part in enumerate(into))
    )
    reference(x).backward()
    spec = scale("full_backward", 4.0, "inner", path=path)
    _, probe = run_step(net, {"own": spec}, x, loss=torch.clone)
    assert_close(gradients(net), gradients(reference), rtol=1e-10, atol=1e-12)
    assert [row["path"] for row in probe.sink.records("effects")] == [path]


class Attention(nn.Module):
    """Attention of one head with dropout and a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4) for _ in range(4))
        self.dropout, self.last = nn.Dropout(0.4), nn.Dropout(0.4)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = (self.dropout(self.q(query)) @ self.k(key).transpose(-1, -2)).softmax(-1)
        return self.o(self.last(weights) @ self.v(value)) + 0.1 * query


class WithCache(Attention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, cache: Cache) -> Tensor:
        cache.count, cache.last = cache.count + 1, key
        return super().forward(query, key, value) * cache.count


class WritesToMask(Attention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        mask += 1
        return super().forward(query, key, value) * mask


class ReturnsOtherArgument(Attention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(query, key, value) + other, other


class InPlace(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.relu(super().forward(query, key, value)) + self.relu(self.q(query))


def nested() -> nn.Module:
    a, b = Attention(), Attention()
    return Calls(lambda a, b, q, k, v: b(a(q, k, v), k, k) + a(q, q, q), a=a, b=b)


class Helper:
    """Refers to a module."""

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)


SENTINEL = object()


class Scaled(nn.Parameter):
    def scaled(self) -> Tensor:
        return self * 2


class WithReferences(Attention):
    """Its attributes refer to it in containers, functions and objects."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mode, self.factor = nn.BatchNorm1d(5), SENTINEL, Scaled(torch.ones(4))
        self.functions = {"norm": lambda x: self.norm(x) + 1}
        self.part, self.helper = functools.partial(lambda factor, x: self.norm(x) * factor, 2.0), Helper(self)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        x = self.functions["norm"](self.part(self.q(query) * self.k(key)))
        x = self.helper.module().norm(x) * self.factor.scaled()
        return x + self.v(value) if self.mode is SENTINEL else super().forward(query, key, value)


def add_references(net: Net) -> None:
    """Let the attributes refer to this module, not to the one of which it is a copy."""
    inner = net.inner
    inner.functions, inner.mode, inner.helper = {"norm": lambda x: inner.norm(x) + 1}, SENTINEL, Helper(inner)
    inner.part = functools.partial(lambda factor, x: inner.norm(x) * factor, 2.0)


class StoresLoss(Attention):
    """Stores an auxiliary loss, and tensors of earlier calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.auxiliary = (query * key.sin()).square().mean()
        self.seen.append(query)
        return super().forward(query, key, value)


def with_auxiliary_loss(module: nn.Module, h: Tensor) -> tuple[Tensor, Tensor]:
    return module(h, h, h), module.auxiliary


def with_different_tensors(module: nn.Module, h: Tensor) -> tuple[Tensor, Tensor]:
    return module(h, h.sin(), h * h), module.auxiliary


def with_hook_on_output(module: nn.Module, h: Tensor) -> Tensor:
    output = module(h, h, h)
    output.register_hook(lambda gradient: gradient * 3)
    return output


def replace_forward(net: Net) -> None:
    old = net.inner.forward
    net.inner.forward = lambda *args: old(*args) * 2


def replace_forward_like_accelerate(net: Net) -> None:
    net.inner.old_forward = net.inner.forward
    net.inner.forward = functools.partial(lambda module, *args: module.old_forward(*args) * 2, net.inner)


def hook_adder(name: str, fn: Callable[..., Any], kind: str = "forward_hook") -> Callable[[Net], Any]:
    return lambda net: getattr(net.inner.get_submodule(name), f"register_{kind}")(fn)


def compile_parts(net: Net) -> None:
    net.inner.k.compile(backend="eager")
    net.inner.o = torch.compile(net.inner.o, backend="eager")
    net.inner.v.forward = torch.compile(net.inner.v.forward, backend="eager")


def with_same_tensor(module: nn.Module, h: Tensor) -> Any:
    return module(h, h, h)


def double_output(module: nn.Module, args: Any, output: Any) -> Any:
    return output * 2 if isinstance(output, Tensor) else (output[0] * 2, output[1])


class Case(NamedTuple):
    """Functions that return a module and call it, and what other code changes in the network."""

    make: Callable[[], nn.Module]
    call: Callable[[nn.Module, Tensor], Any]
    change: Callable[[Net], Any] = lambda net: None


CHANGED = {
    "forward": Case(Attention, with_same_tensor, replace_forward),
    "forward with the module as argument": Case(Attention, with_same_tensor, replace_forward_like_accelerate),
    "hook that changes nothing": Case(Attention, with_same_tensor, hook_adder("k", lambda module, args, output: None)),
    "nested": Case(nested, with_same_tensor),
    "module in place": Case(InPlace, with_same_tensor),
    "attention of a decoder": Case(
        lambda: nn.TransformerDecoderLayer(4, 2, 8, 0.3, batch_first=True), lambda m, h: m(h, h)
    ),
    "compiled parts": Case(Attention, with_same_tensor, compile_parts),
    "references to the module": Case(WithReferences, with_same_tensor, add_references),
    "gradient of the output": Case(Attention, with_hook_on_output),
    "auxiliary loss": Case(StoresLoss, with_auxiliary_loss),
    "auxiliary loss of different arguments": Case(StoresLoss, with_different_tensors),
    "a lock": Case(Attention, with_same_tensor, lambda net: setattr(net.inner, "lock", threading.Lock())),
    "a cache": Case(WithCache, lambda m, h: m(h, h, h, Cache())),
    "a mask": Case(WritesToMask, lambda m, h: m(h, h, h, mask=torch.zeros(()))),
    "another argument returned": Case(ReturnsOtherArgument, lambda m, h: m(h, h, h, h.cos())),
}
CHANGED_BY_HOOKS = {
    "output": hook_adder("k", double_output),
    "output in place": hook_adder("o", lambda module, args, output: output.mul_(2)),
    "input": hook_adder("v", lambda module, args: (args[0].cos(),), "forward_pre_hook"),
    "gradient": hook_adder("q", lambda module, into, out: (5 * into[0],), "full_backward_hook"),
    "own output": hook_adder("", double_output),
}
INTERVENTIONS = {
    "clip": {"kind": "forward", "action": "clip", "min": -0.3, "max": 0.3},
    "scale": {"kind": "forward_pre", "action": "scale", "factor": 0.5},
    "scaled gradient": {"kind": "full_backward", "action": "scale", "factor": 0.5},
    "no gradient": {"kind": "full_backward_pre", "action": "scale", "factor": 0.0},
}


def run_changed(net: Net, specs: dict[str, Any]) -> Any:
    """Train in double precision with these hooks. Return the probe."""
    torch.manual_seed(3)
    x = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return run_steps(net, specs, lambda: net(x).backward(), rules=None)


@pytest.mark.spread(4)
@pytest.mark.parametrize("name", CHANGED)
def test_gradients_match_pytorch_if_module_is_changed(name: str) -> None:
    make, call, change = CHANGED[name]
    torch.manual_seed(0)
    net = Net(make(), 4, call).double()
    reference, baseline = copy.deepcopy(net), copy.deepcopy(net)
    for each in (net, reference, baseline):
        change(each)
    wanted: list[Tensor] = []
    reference.inner.register_full_backward_hook(lambda module, into, out: wanted.extend(into))
    run_changed(reference, {})
    run_changed(baseline, {})
    probe = run_changed(net, INNER)
    assert all(map(equal, state_of(net), state_of(baseline)))
    rows = sorted(probe.sink.records("tensors"), key=lambda row: row["path"])
    assert [row["path"] for row in rows] == [str(i) for i in range(len(wanted)) if wanted[i] is not None]
    for row, gradient in zip(rows, (each for each in wanted if each is not None), strict=True):
        torch.testing.assert_close(row["values"], gradient.to(row["values"].dtype), rtol=1e-6, atol=1e-7)


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", [*CHANGED_BY_HOOKS, *INTERVENTIONS])
def test_gradients_that_hooks_change_are_reported(name: str) -> None:
    specs = {"change": {**INTERVENTIONS[name], "layers": "inner.*"}} if name in INTERVENTIONS else {}
    torch.manual_seed(0)
    net = Net(Attention(), 4, with_same_tensor).double()
    baseline = copy.deepcopy(net)
    for each in (net, baseline):
        CHANGED_BY_HOOKS.get(name, lambda net: None)(each)
    run_changed(baseline, specs)
    probe = run_changed(net, specs | INNER)
    assert all(map(equal, state_of(net), state_of(baseline)))
    assert not [row for row in probe.sink.records("tensors") if row["hook"] == "own"]
    (row,) = (row for row in probe.coverage() if row["hook"] == "own")
    assert (row["expected"], row["fired"]) == (1, 0)
    assert "hooks" in row["cause"]


class WritesToParameters(Attention):
    """Averages a parameter, as a codebook, without changing its version."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.k.weight.data.mul_(0.9)
        output = super().forward(query, key, value)
        self.code.data.mul_(0.9).add_(0.1 * output.detach().mean((0, 1)))
        return output


class DrawsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient + 0 * torch.rand_like(gradient)


class AddsInBackward(torch.autograd.Function):
    """Adds the gradient of a weight to its attribute `main_grad`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        ctx.weight.main_grad += gradient.flatten(0, 1).t() @ ctx.saved_tensors[0].flatten(0, 1)
        return gradient @ ctx.weight, None


class HasSideEffects(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.append, self.calls = self.seen.append, 0
        self.q.weight.main_grad = torch.zeros(4, 4, dtype=torch.float64)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.append(1)
        self.itself().calls += 1
        return DrawsInBackward.apply(AddsInBackward.apply(query, self.q.weight) * key) + self.v(value)


def add_side_effects(net: Net) -> None:
    net.inner.itself = weakref.ref(net.inner)
    net.inner.seen = []
    net.inner.append = net.inner.seen.append
    net.inner.q.weight.main_grad = torch.zeros(4, 4, dtype=torch.float64)

    def forward(*args: Any, module: Any = net.inner, old: Any = net.inner.forward) -> Tensor:
        module.calls += 1
        return old(*args)

    net.inner.forward = forward


def effects_of(net: Net) -> list[Any]:
    inner = net.inner
    effects = [inner.seen, inner.calls, inner.q.weight.main_grad] if isinstance(inner, HasSideEffects) else []
    return [*net.parameters(), *(p.grad for p in net.parameters()), torch.get_rng_state(), *effects]


@pytest.mark.parametrize(
    ("make", "change"), [(WritesToParameters, lambda net: None), (HasSideEffects, add_side_effects)]
)
def test_second_evaluation_has_no_side_effects(make: Callable[[], nn.Module], change: Callable[[Net], None]) -> None:
    torch.manual_seed(0)
    net = Net(make(), 4, with_same_tensor).double()
    baseline = copy.deepcopy(net)
    for each in (net, baseline):
        change(each)
    run_changed(baseline, {})
    effects = effects_of(baseline)
    probe = run_changed(net, INNER)
    assert all(map(equal, effects_of(net), effects))
    assert len(probe.sink.records("tensors")) == 3


class Outside(Attention):
    """Calls a module that is not its submodule."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.others[0](super().forward(query, key, value))


def test_hooks_of_other_modules_run_once() -> None:
    calls: list[nn.Module] = []
    model, other, h = Outside(), nn.LayerNorm(4), torch.ones(2, 3, 4, requires_grad=True)
    model.others = (other,)
    other.register_forward_hook(lambda module, args, output: calls.append(module))
    with instrument.attach(model, OWN):
        model(h, h, h)
    assert calls == [other]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_match_pytorch_under_autocast(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.MultiheadAttention(16, 2, batch_first=True)
    reference, wanted = copy.deepcopy(model), []
    reference.register_full_backward_hook(lambda module, into, out: wanted.extend(into))
    x = torch.randn(2, 5, 16, requires_grad=True)

    def run(attention: nn.Module) -> None:
        with torch.autocast("cpu", dtype):
            h = nn.functional.layer_norm(x, (16,))
            output = attention(h, h, h)[0]
        output.float().square().sum().backward()

    run(reference)
    found = tensors_by(run_steps(model, OWN, lambda: run(model)), "path")
    assert [*found] == ["0", "1", "2"]
    assert_close(found.values(), wanted, rtol=2e-2, atol=2e-2)


def test_second_pass_of_double_backward_is_reported() -> None:
    torch.manual_seed(0)
    model, x = Attention().eval(), torch.randn(2, 3, 4, requires_grad=True)
    with instrument.attach(model, OWN) as probe:
        h = x * 1.0
        (gradient,) = torch.autograd.grad(model(h, h, h).square().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        probe.end_step()
    (row,) = probe.coverage()
    assert counts(probe) == [(2, 1)]
    assert "one tensor as several arguments" in row["cause"]


def test_global_hooks_see_no_second_evaluation() -> None:
    seen: list[nn.Module] = []
    model, h = Attention(), torch.ones(2, 3, 4, requires_grad=True)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        with instrument.attach(model, OWN):
            model(h, h, h)
    finally:
        handle.remove()
    assert seen == [model.q, model.dropout, model.k, model.last, model.v, model.o, model]


def test_compiled_part_is_evaluated_with_two_repeated_arguments() -> None:
    model = Calls(lambda linear, a, b, c, d: linear(a) * b + c * d, linear=nn.Linear(3, 3))
    model.linear.compile(backend="eager")
    call, h = model.linear._compiled_call_impl, torch.ones(2, 3, requires_grad=True)
    other = h.sin()
    _, probe = run_step(model, OWN, h, other, h, other, loss=torch.sum)
    assert model.linear._compiled_call_impl is call
    assert len(probe.sink.records("tensors")) == 4


class Single(nn.Bilinear):
    """Its constructor returns the same object each time."""

    instance: Any = None

    def __new__(cls, *args: Any) -> Single:
        cls.instance = cls.instance or super().__new__(cls)
        return cls.instance


def test_module_with_its_own_constructor_is_copied() -> None:
    model, h = Single(3, 3, 3), torch.ones(2, 3, requires_grad=True)
    model.register_forward_hook(lambda module, args, output: None)
    _, probe = run_step(model, OWN, h, h, loss=torch.sum)
    assert len(model._forward_hooks) == 1
    assert len(probe.sink.records("tensors")) == 2


class ReturnsQuery(Attention):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(query, key, value), query


def test_returned_argument_has_the_gradient_of_all_other_uses() -> None:
    torch.manual_seed(0)
    model = ReturnsQuery().double().eval()
    h = torch.randn(2, 5, 4, dtype=torch.float64, requires_grad=True)
    query, key, value = (h.detach().clone().requires_grad_() for _ in range(3))
    output, returned = model(query, key, value)
    (output.square().sum() + returned.sin().sum() + query.cos().sum()).backward()
    with instrument.attach(model, OWN) as probe:
        hidden = h * 1.0
        output, returned = model(hidden, hidden, hidden)
        (output.square().sum() + returned.sin().sum() + hidden.cos().sum()).backward()
        probe.end_step()
    rows = tensors_by(probe, "path")
    for path, argument in {"0": query, "1": key, "2": value}.items():
        torch.testing.assert_close(rows[path], argument.grad.to(rows[path].dtype), rtol=1e-6, atol=1e-7)


class HasPythonGenerator(nn.Module):
    """A generator cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = (float(i) for i in range(1, 9))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a * b * next(self.factors)


class RunsOnce(torch.autograd.Function):
    passes = iter([None])

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        next(RunsOnce.passes)
        return gradient


FACTORS = {"all": iter([2.0, 3.0]), "small": iter([1.0, 3.0])}


@pytest.mark.parametrize(
    ("make", "cause"),
    [
        (lambda: Calls(lambda a, b: a.add_(1) * b), "writes to an argument"),
        (HasPythonGenerator, "cannot be copied: TypeError: cannot pickle 'generator' object"),
        # The second evaluation has another result: everywhere, or in channels that are small next to the first one.
        (lambda: Calls(lambda a, b: a * b * next(FACTORS["all"])), "gives another result"),
        (
            lambda: Calls(lambda a, b: a * b * torch.tensor([1e7, x := next(FACTORS["small"]), x])),
            "gives another result",
        ),
        (lambda: Calls(lambda a, b: RunsOnce.apply(a) * b), "backward pass fails: StopIteration"),
        # PyTorch cannot compute the gradients of chosen tensors through reentrant checkpointing.
        (
            lambda: Calls(lambda a, b: checkpoint(torch.sin, a, use_reentrant=True) * b),
            "backward pass fails: RuntimeError: When use_reentrant=True",
        ),
    ],
)
def test_unknown_gradients_are_reported(make: Callable[[], nn.Module], cause: str) -> None:
    model, h = make(), torch.ones(2, 3, requires_grad=True)
    hidden = h * 1.0
    _, probe = run_step(model, OWN, hidden, hidden, loss=torch.sum)
    assert h.grad is not None
    assert not probe.sink.records("tensors")
    (row,) = probe.coverage()
    assert counts(probe) == [(1, 0)]
    assert "one tensor as several arguments" in row["cause"]
    assert cause in row["cause"]
