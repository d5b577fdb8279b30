"""A tensor that a module gets as several arguments: each has its own gradient, as with PyTorch's full backward hook."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import instrument

RECORD = {"kind": "full_backward", "action": "record", "stats": "none", "tensors": True}


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


class ReturnsParts(nn.Module):
    """Returns its first product, also used in the second output, and the second output twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Bilinear(3, 3, 3), nn.Bilinear(3, 3, 3)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.first(a, b)
        z = self.second(y, a)
        return y, z, z


def attention() -> nn.Module:
    return nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[[nn.Module, Tensor], Any], list[str]]] = {
    "two": (Weighted, (2, 3), lambda m, h: m(h, h), ["0", "1"]),
    "three": (Weighted, (2, 3), lambda m, h: m(h, h, h), ["0", "1", "2"]),
    "another tensor between": (Weighted, (2, 3), lambda m, h: m(h, h.sin(), h), ["0", "1", "2"]),
    "two pairs": (Weighted, (2, 3), lambda m, h: m(h, g := h.sin(), h, g), ["0", "1", "2", "3"]),
    "a view": (Weighted, (2, 3), lambda m, h: m(v := h.view(2, 3), h, v), ["0", "1", "2"]),
    "bilinear": (lambda: nn.Bilinear(3, 3, 3), (2, 3), lambda m, h: m(h, h), ["0", "1"]),
    "outputs that depend on each other": (ReturnsParts, (2, 3), lambda m, h: m(h, h), ["0", "1"]),
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
        with instrument.attach(net, {"own": {**RECORD, "layers": "inner"}}) as probe:
            train(net, shape)
            probe.end_step()
        assert all(map(equal, state_of(net), state))
    finally:
        torch.set_default_dtype(torch.float32)
    rows = {row["path"]: row["values"] for row in probe.sink.records("tensors")}
    assert sorted(rows) == paths
    for path, gradient in zip(paths, wanted, strict=True):
        torch.testing.assert_close(rows[path], gradient, rtol=1e-12, atol=1e-14)
    assert not probe.warnings


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
    with instrument.attach(model, {"own": {**RECORD, "layers": "."}}) as probe:
        hidden = h * 1.0
        output = call(model, hidden) if reentrant is None else checkpoint(call, model, hidden, use_reentrant=reentrant)
        output.sum().backward()
        probe.end_step()
    rows = {row["path"]: set(row["values"].flatten().tolist()) for row in probe.sink.records("tensors")}
    calls = 2.0 if reentrant else 1.0  # the module counts its calls
    assert rows == {path: {factor * calls} for path, factor in factors.items()}
    assert all(row["fired"] == row["expected"] == 1 for row in probe.coverage())


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
    spec = {"layers": "inner", "kind": "full_backward", "action": "scale", "factor": 4.0, "path": path}
    with instrument.attach(net, {"own": spec}) as probe:
        net(x).backward()
        probe.end_step()
    for actual, wanted in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, wanted.grad, rtol=1e-10, atol=1e-12)
    assert [row["path"] for row in probe.sink.records("effects")] == [path]


def scale_first(tensors: dict[str, Tensor], context: Any) -> dict[str, Tensor]:
    return {path: tensor * (4 if path == "0" else 1) for path, tensor in tensors.items()}


def test_joined_gradients_are_those_of_each_argument() -> None:
    model, h = Weighted().eval(), torch.ones(2, 3, requires_grad=True)
    spec = {"layers": ".", "kind": "full_backward", "action": "modify", "fn": scale_first, "together": True}
    with instrument.attach(model, {"own": spec}) as probe:
        hidden = h * 1.0
        model(hidden, hidden).sum().backward()
        probe.end_step()
    assert set(h.grad.flatten().tolist()) == {4 * 2.0 + 3.0}


class WritesInPlace(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        a += 1
        return a * b


class Cached(nn.Module):
    def forward(self, a: Tensor, b: Tensor, cache: Any) -> Tensor:
        cache.count += 1
        return a * b


class Hooked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Bilinear(3, 3, 3)
        self.inner.register_forward_hook(lambda module, into, out: out * 3)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return self.inner(a, b)


@pytest.mark.parametrize("name", ["in place", "cache", "lock", "hook", "replaced forward"])
def test_module_that_cannot_be_evaluated_again_is_reported(name: str) -> None:
    model, cache = (WritesInPlace(), ()) if name == "in place" else (Cached(), (Cache(),))
    if name == "lock":  # it cannot be copied
        model, cache = nn.Bilinear(3, 3, 3), ()
        model.lock = threading.Lock()
    if name == "hook":  # it is not called in the second evaluation
        model, cache = Hooked(), ()
    if name == "replaced forward":  # it would call the module itself, not its copy
        model, cache = WritesInPlace(), ()
        model.calls, model.forward = [], lambda a, b: model.calls.append(1) or a * b
    h = torch.ones(3, requires_grad=True)
    with instrument.attach(model, {"own": {**RECORD, "layers": "."}}) as probe:
        hidden = h * 1.0
        model(hidden, hidden, *cache).sum().backward()
        probe.end_step()
    assert not cache or cache[0].count == 1
    assert name != "replaced forward" or model.calls == [1]
    assert not probe.sink.records("tensors")
    (row,) = probe.coverage()
    assert (row["expected"], row["fired"]) == (1, 0)
    assert "one tensor as several arguments" in row["cause"]
