"""A tensor that a module gets as several arguments: interventions get the gradient of each, records report that it is unknown."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hook_runs import Calls, assert_close, gradients, keep, run_step, run_steps, scale, tensors_by
from torch import Tensor, nn

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


SEPARATE = {"another tensor between": "1", "a view": "1", "attention to a memory": "0"}
"""The arguments that are no other argument too."""


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
def test_records_report_arguments_without_a_gradient_of_their_own(name: str) -> None:
    """The gradients of the other arguments are those of PyTorch's full backward hook."""
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
    assert [*rows] == [path for path in paths if path in SEPARATE.get(name, ())]
    assert_close([rows[path] for path in rows], [wanted[int(path)] for path in rows], rtol=1e-12, atol=1e-14)
    (row,) = probe.coverage()
    assert (row["expected"], row["fired"]) == (1 + bool(rows), int(bool(rows)))
    assert "one tensor as several arguments" in row["cause"]
    assert "via: module" in row["cause"]


def test_via_module_records_each_argument() -> None:
    model, h = Weighted().eval(), torch.ones(2, 3, requires_grad=True)
    spec = {**OWN["own"], "via": "module"}
    probe = run_steps(model, {"own": spec}, lambda: model(h * 1.0, h * 1.0).sum().backward())
    again = run_steps(model, {"own": spec}, lambda: model(x := h * 1.0, x).sum().backward())
    factors = [
        {path: values.unique().item() for path, values in tensors_by(each, "path").items()} for each in (probe, again)
    ]
    assert factors == [{"0": 2.0, "1": 3.0}, {"0": 4.0, "1": 6.0}]  # the module counts its calls


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
