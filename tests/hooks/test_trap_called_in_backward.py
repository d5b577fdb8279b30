"""Trap: code that is not activation checkpointing calls modules inside the backward pass. Each call counts like any other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hook_runs import Calls, counts, keep, record, run_step, scale
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import instrument


class Feedback(torch.autograd.Function):
    """Passes its input on. The gradient goes through a network that runs only in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: nn.Module) -> Tensor:
        ctx.net = net
        return x * 1

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        with torch.no_grad():
            return ctx.net(gradients[0]), None


class Adjoint(torch.autograd.Function):
    """A differential equation that is solved again in the backward pass, in another number of Euler steps."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, net: nn.Module, *weights: Tensor) -> Tensor:
        for _ in range(4):
            z = z + 0.25 * net(z)
        ctx.net, ctx.weights = net, weights
        ctx.save_for_backward(z)
        return z

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (z,), (adjoint,) = ctx.saved_tensors, gradients
        sums = [torch.zeros_like(weight) for weight in ctx.weights]
        for _ in range(6):
            with torch.enable_grad():
                y = z.detach().requires_grad_()
                slope = ctx.net(y)
                parts = torch.autograd.grad(slope, [y, *ctx.weights], adjoint)
            z, adjoint = (z - slope / 6).detach(), adjoint + parts[0] / 6
            sums = [total + part / 6 for total, part in zip(sums, parts[1:], strict=True)]
        return adjoint, None, *sums


class Reversible(torch.autograd.Function):
    """A reversible block: the backward pass computes the inputs from the outputs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, net: nn.Module, *weights: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        first = first + net(second)
        second = second + net(first)
        ctx.net, ctx.weights = net, weights
        ctx.save_for_backward(first, second)
        return torch.cat([first, second], -1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        first, second = (part.detach().requires_grad_() for part in ctx.saved_tensors)
        of_first, of_second = gradients[0].chunk(2, -1)
        with torch.enable_grad():
            change = ctx.net(first)
            to_first, *to_weights = torch.autograd.grad(change, [first, *ctx.weights], of_second)
            of_first = of_first + to_first
            second = (second - change).detach().requires_grad_()
            to_second, *more = torch.autograd.grad(ctx.net(second), [second, *ctx.weights], of_first)
        sums = [one + other for one, other in zip(to_weights, more, strict=True)]
        return torch.cat([of_first, of_second + to_second], -1), None, *sums


class Caller(nn.Module):
    def __init__(self, function: Any, width: int = 3) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(width, width), nn.Tanh())
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        weights = () if self.function is Feedback else self.net.parameters()
        return self.function.apply(x, self.net, *weights)


MAKE: dict[str, Callable[[], tuple[Caller, int]]] = {
    "feedback": lambda: (Caller(Feedback), 1),
    "adjoint": lambda: (Caller(Adjoint), 10),
    "reversible": lambda: (Caller(Reversible, 2), 4),
}


def batch_of(model: Caller) -> Tensor:
    width = model.net[0].in_features * (2 if model.function is Reversible else 1)
    return torch.randn(2, width, generator=torch.Generator().manual_seed(1)).requires_grad_()


@pytest.mark.spread(1)
@pytest.mark.parametrize("name", MAKE)
def test_records_equal_those_of_forward_hooks(name: str) -> None:
    torch.manual_seed(0)
    model, calls = MAKE[name]()
    x, seen = batch_of(model), []
    specs = {
        "plain": record("forward", "net.0"),
        "seen": keep("forward", "net"),
        "before": keep("forward_pre", "net"),
        "functions": record("function", "net.0", functions="linear"),
    }
    with instrument.attach(model, specs) as probe:
        handle = model.net.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
        model(x).square().sum().backward()
        probe.end_step()
    handle.remove()
    assert len(seen) == calls
    rows = {(row["hook"], row["call"]): row for row in probe.sink.records("tensors")}
    assert len(rows) == 2 * calls
    for call, (given, output) in enumerate(seen):
        assert torch.equal(rows["before", call]["values"], given.detach())
        assert torch.equal(rows["seen", call]["values"], output.detach())
    assert not any(row["recompute"] for row in rows.values())
    assert counts(probe) == [(calls, calls)] * len(specs)
    assert not probe.warnings
    assert len(probe.stats.query("hook == 'plain'")) == calls


@pytest.mark.spread(1)
@pytest.mark.parametrize("change", [{"action": "scale", "factor": 0.5}, {"action": "clip", "value": 0.1}], ids=str)
@pytest.mark.parametrize("name", MAKE)
def test_intervention_equals_a_forward_hook(name: str, change: dict[str, Any]) -> None:
    def by_hand(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output * 0.5 if change["action"] == "scale" else output.clamp(-0.1, 0.1)

    gradients = []
    for is_instrumented in (True, False):
        torch.manual_seed(0)
        model, calls = MAKE[name]()
        model.double()
        x = batch_of(model).detach().double().requires_grad_()
        if not is_instrumented:
            model.net.register_forward_hook(by_hand)
        hooks = {"change": {"layers": "net", "kind": "forward", **change}} if is_instrumented else {}
        _, probe = run_step(model, hooks, x, loss=lambda output: output.square().sum())
        gradients.append([x.grad, *(parameter.grad for parameter in model.parameters())])
        if is_instrumented:
            assert [row["call"] for row in probe.sink.records("effects")] == [*range(calls)]
    for actual, wanted in zip(*gradients, strict=True):
        assert (actual is wanted is None) or torch.allclose(actual, wanted, rtol=1e-12)


def test_gradients_of_calls_in_a_backward_pass_are_recorded() -> None:
    torch.manual_seed(0)
    model, _ = MAKE["adjoint"]()
    wanted: list[Tensor] = []
    with instrument.attach(model, {"flow": keep("full_backward", "net")}) as probe:
        model.net[0].register_full_backward_hook(lambda module, into, out: wanted.append(into[0].clone()))
        model(batch_of(model)).square().sum().backward()
        probe.end_step()
    rows = probe.sink.records("tensors")
    assert [row["call"] for row in rows] == [*range(4, 10)]
    assert all(torch.equal(row["values"], gradient) for row, gradient in zip(rows, wanted, strict=True))
    (row,) = probe.coverage()
    assert (row["expected"], row["fired"], row["cause"]) == (10, 6, "the module was called under torch.no_grad()")


@pytest.mark.spread(2)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", MAKE)
def test_caller_inside_a_checkpoint_counts_its_calls(name: str, reentrant: bool) -> None:
    """The recomputation repeats the calls of the forward pass. Those of the backward pass are not a recomputation."""
    torch.manual_seed(0)
    model, calls = MAKE[name]()
    in_forward = {"feedback": 0, "adjoint": 4, "reversible": 2}[name]
    specs = {"seen": record("forward", "net"), "half": scale("forward", 0.5, "net")}
    seen: list[Tensor] = []
    model.net.register_forward_hook(lambda module, args, output: seen.append(output))
    with instrument.attach(model, specs) as probe:
        checkpoint(model, batch_of(model), use_reentrant=reentrant).square().sum().backward()
        probe.end_step()
    assert len(seen) in (calls, calls + in_forward)  # a recomputation ends when all tensors that it saves exist
    assert sorted(probe.stats.call) == [*range(calls)]
    assert sorted(row["call"] for row in probe.sink.records("effects")) == [*range(calls)]
    assert counts(probe) == [(calls, calls)] * 2


def test_checkpoint_inside_a_backward_pass_is_recomputed_once() -> None:
    torch.manual_seed(0)
    model = Caller(Adjoint)
    inside = Calls(lambda linear, x: checkpoint(linear, x, use_reentrant=False), linear=nn.Linear(3, 3))
    model.net = nn.Sequential(inside, nn.Tanh())
    x = torch.randn(2, 3, requires_grad=True)
    _, probe = run_step(model, {"seen": record("forward", "net.0.linear")}, x, loss=torch.sum)
    assert sorted(probe.stats.call) == [*range(10)]
    assert counts(probe) == [(10, 10)]
