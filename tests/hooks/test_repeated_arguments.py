"""A tensor that a module gets as several arguments: what records leave out, and interventions on one of the arguments."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import instrument
from instrument.tables.reasons import REPEATED_ARGUMENT

RECORD = {"kind": "full_backward", "action": "record", "stats": "none", "tensors": True}


class Weighted(nn.Module):
    """A sum of nested arguments with the weights 2, 3, 5, ..., with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        parts: list[Tensor] = []

        def collect(value: Any) -> None:
            if isinstance(value, Tensor):
                parts.append(value)
            for item in value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ():
                collect(item)

        collect([*args, kwargs])
        weighted = [factor * part for factor, part in zip((2, 3, 5, 7, 11), parts, strict=False)]
        return self.dropout(torch.stack(weighted).sum(0))


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


def attention() -> nn.Module:
    return nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)


# The module, the shape of the input, the call, and the paths of the tensors that are one argument only.
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Callable[[nn.Module, Tensor], Any], list[str]]] = {
    "two": (Weighted, (2, 3), lambda m, h: m(h, h), []),
    "three": (Weighted, (2, 3), lambda m, h: m(h, h, h), []),
    "another tensor between": (Weighted, (2, 3), lambda m, h: m(h, h.sin(), h), ["1"]),
    "two pairs": (Weighted, (2, 3), lambda m, h: m(h, g := h.sin(), h, g), []),
    "a view": (Weighted, (2, 3), lambda m, h: m(v := h.view(2, 3), h, v), ["1"]),
    "bilinear": (lambda: nn.Bilinear(3, 3, 3), (2, 3), lambda m, h: m(h, h), []),
    "attention": (attention, (2, 5, 4), lambda m, h: m(h, h, h), []),
    "attention to a memory": (attention, (2, 5, 4), lambda m, h: m(h, g := h.sin(), g), ["0"]),
}


@pytest.mark.parametrize("via", ["tensor", "module"])
@pytest.mark.parametrize("name", CASES)
def test_records_equal_pytorch_hooks_or_are_left_out(name: str, via: str) -> None:
    make, shape, call, alone = CASES[name]
    torch.manual_seed(0)
    net = Net(make(), shape[-1], call).double()
    reference, baseline = copy.deepcopy(net), copy.deepcopy(net)
    wanted: list[Tensor] = []
    reference.inner.register_full_backward_hook(lambda module, into, out: wanted.extend(into))
    x = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for each in (reference, baseline):
        torch.manual_seed(3)
        each(x).backward()
    state = torch.get_rng_state()
    with instrument.attach(net, {"own": {**RECORD, "layers": "inner", "role": "grad_input", "via": via}}) as probe:
        torch.manual_seed(3)
        net(x).backward()
        probe.end_step()
    rows = {row["path"]: row["values"] for row in probe.sink.records("tensors")}
    assert sorted(rows) == (alone if via == "tensor" else [str(path) for path in range(len(wanted))])
    for path, values in rows.items():
        torch.testing.assert_close(values, wanted[int(path)], rtol=1e-12, atol=1e-14)
    (row,) = probe.coverage()
    assert row["fired"] == row["expected"] == bool(rows)
    assert row["cause"] == (REPEATED_ARGUMENT if via == "tensor" else "")
    assert [REPEATED_ARGUMENT in warning for warning in probe.warnings] == ([] if rows else [True])
    if via == "tensor":  # PyTorch's hook gives the module other tensors, which changes the rounding of sums
        assert torch.equal(torch.get_rng_state(), state)
        for actual, expected in zip(net.parameters(), baseline.parameters(), strict=True):
            assert torch.equal(actual.grad, expected.grad)


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
def test_keyword_and_nested_arguments_have_their_own_effects(
    call: Any, factors: dict[str, int], reentrant: bool | None
) -> None:
    """The gradient of a sum with weights is the weight. PyTorch's hook sees positional tensors only."""
    model, h = Weighted().eval(), torch.ones(2, 3, requires_grad=True)
    spec = {"layers": ".", "kind": "full_backward", "action": "scale", "factor": 4.0}
    with instrument.attach(model, {"own": spec}) as probe:
        hidden = h * 1.0
        output = call(model, hidden) if reentrant is None else checkpoint(call, model, hidden, use_reentrant=reentrant)
        output.sum().backward()
        probe.end_step()
    root = h.numel() ** 0.5
    norms = {row["path"]: row["norm_before"] for row in probe.sink.records("effects") if row["role"] == "grad_input"}
    assert norms == pytest.approx({path: factor * root for path, factor in factors.items()})


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
