"""Trap: gradients of gradients: a gradient penalty, and `torch.autograd.grad` within a step.

A gradient hook is then part of a differentiated function: recording must leave no trace in either pass, and a change
must have the derivative of the changed function.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hook_locations import GRADIENT_LOCATIONS, record_hooks
from hook_runs import Calls, keep, run_step, scale
from torch import Tensor, nn

import instrument
from instrument.tables.reasons import WRAPPED

RECORDS: dict[str, Any] = {
    **record_hooks(GRADIENT_LOCATIONS),
    "forward": keep("forward", "**"),
    "micro": keep("parameter_grad_micro", "**"),
    "sums": keep("post_accumulate_grad", "**"),
}


def critic() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(4, 16), nn.Tanh(), nn.Identity(), nn.Linear(16, 8), nn.ELU(inplace=True), nn.Linear(8, 1)
    )


def points() -> Tensor:
    torch.manual_seed(1)
    return torch.randn(5, 4, requires_grad=True)


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    """Return the gradient penalty of Gulrajani et al. 2017: the distance of the gradient norm from 1."""
    (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (slope.norm(dim=1) - 1).square().mean()


def gradients(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def batched_by_autograd(output: Tensor, inputs: list[Tensor], vectors: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(output, inputs, vectors, is_grads_batched=True)


def batched_by_vmap(output: Tensor, inputs: list[Tensor], vectors: Tensor) -> tuple[Tensor, ...]:
    result: tuple[Tensor, ...] = torch.func.vmap(lambda vector: torch.autograd.grad(output, inputs, vector))(vectors)
    return result


@pytest.mark.parametrize("action", [{"action": "record"}, {"action": "scale", "factor": 2.0}])
@pytest.mark.parametrize("batched", [batched_by_autograd, batched_by_vmap])
def test_gradients_of_several_vectors_at_once_are_reported(batched: Any, action: dict[str, Any]) -> None:
    """As in `torch.autograd.functional.jacobian(vectorize=True)`: no hook can read these tensors."""
    model = critic()
    functions = {"kind": "function_grad", "functions": "*"}
    kinds = ("full_backward", "full_backward_pre", "tensor", "parameter_grad_micro")
    hooks = {kind: {"layers": "3", "kind": kind, **action} for kind in kinds}
    hooks["functions"] = {"layers": "3", **functions, **action}

    def jacobian() -> tuple[Tensor, ...]:
        x = points()
        return batched(model(x)[:, 0], [x, *model.parameters()], torch.eye(5))

    expected = jacobian()
    with pytest.warns(instrument.InstrumentWarning), instrument.attach(model, hooks) as probe:
        actual = jacobian()
        probe.end_step()
    assert all(map(torch.equal, actual, expected))
    rows = probe.coverage()
    assert {row["hook"] for row in rows} == {*hooks}
    assert {(row["fired"], row["expected"], row["cause"]) for row in rows} == {(0, 1, WRAPPED)}


def test_rows_of_both_passes_have_distinct_keys() -> None:
    """A mean over rows with equal keys, one from each pass, would be a wrong number."""
    model = critic()
    with instrument.attach(model, RECORDS) as probe:
        penalty(model, points()).backward()
        x = points()
        model(x).sum().backward(retain_graph=True)
        probe.end_step()
    table = probe.sink.frame("tensors")
    of = ["hook", "layer", "path", "call", "backward"]
    assert not table.duplicated(of).any()
    assert table.duplicated(of[:-1]).any()


@pytest.mark.slow
def test_recording_does_not_change_the_second_derivative() -> None:
    baseline = critic()
    penalty(baseline, points()).backward()
    for hooks in (RECORDS, *({name: spec} for name, spec in RECORDS.items())):
        model = critic()
        with instrument.attach(model, hooks) as probe:
            penalty(model, points()).backward()
            probe.end_step()
        actual, wanted = gradients(model), gradients(baseline)
        assert len(actual) == len(wanted) > 0
        assert all(map(torch.equal, actual, wanted)), list(hooks)


def test_both_backward_passes_are_recorded_in_order() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    plain = copy.deepcopy(model)
    hidden = plain[0](points())
    (slope,) = torch.autograd.grad(plain[1](hidden).sum(), hidden, create_graph=True)
    (second,) = torch.autograd.grad(slope.square().sum(), hidden)
    with instrument.attach(model, {"flow": keep("tensor", "0")}) as probe:
        x = points()
        out = model[0](x)
        (actual,) = torch.autograd.grad(model[1](out).sum(), out, create_graph=True)
        actual.square().sum().backward()
        probe.end_step()
    first, then = probe.sink.records("tensors")
    assert torch.equal(first["values"], slope.detach())
    assert torch.equal(then["values"], second)
    assert [(row["call"], row["backward"]) for row in (first, then)] == [(0, 0), (0, 1)]
    assert not probe.warnings


@pytest.mark.spread(2)
@pytest.mark.parametrize("factor", [3.0, -0.5])
@pytest.mark.parametrize("kind", ["full_backward_pre", "full_backward", "tensor"])
def test_change_has_the_derivative_of_the_changed_function(kind: str, factor: float) -> None:
    """Scaling what flows through a layer scales it in both passes, as a function with that derivative does.

    A hook of kind tensor is on the tensor itself, like `Tensor.register_hook`: the gradient that returns because tanh
    saved its output passes the hook too.
    """

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * factor

    def changed(model: nn.Sequential, x: Tensor) -> Tensor:
        x = model[0](x)
        x = Scaled.apply(x) if kind == "full_backward" else x
        x = model[1](x)
        if kind == "tensor":
            x.register_hook(lambda gradient: gradient * factor)
        return model[2](Scaled.apply(x) if kind == "full_backward_pre" else x)

    def smooth() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    x = points().detach().double().requires_grad_()
    model, wanted = smooth(), smooth()
    (slope,) = torch.autograd.grad(changed(wanted, x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    with instrument.attach(model, {"h": scale(kind, factor, "1")}) as probe:
        (actual,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        actual.square().sum().backward()
        probe.end_step()
    assert torch.equal(actual, slope)
    for parameter, same in zip(model.parameters(), wanted.parameters(), strict=True):
        if same.grad is not None:
            assert torch.allclose(parameter.grad, same.grad, rtol=1e-12, atol=0)
    baseline = smooth()
    (slope,) = torch.autograd.grad(baseline(x).sum(), x, create_graph=True)
    slope.square().sum().backward()
    assert not torch.allclose(baseline[0].weight.grad, model[0].weight.grad)


def test_gradient_that_a_module_computes_in_its_forward_pass_is_unchanged() -> None:
    """A force, the gradient of an energy, does not flow to the previous modules: as with PyTorch's hook, it is not `grad_input`."""

    def force(energy: nn.Module, x: Tensor) -> Tensor:
        return torch.autograd.grad(energy(x).sum(), x, create_graph=True)[0]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), Calls(force, energy=nn.Sequential(nn.Linear(4, 8), nn.Tanh())))
    plain = copy.deepcopy(model)
    plain[1].register_full_backward_hook(lambda module, inputs, outputs: (3 * inputs[0],))
    run_step(model, {"h": scale("full_backward", 3.0, "1")}, points().detach(), loss=lambda out: out.square().sum())
    plain(points().detach()).square().sum().backward()
    assert all(map(torch.equal, gradients(model), gradients(plain)))


def test_autograd_grad_is_unchanged_and_fills_no_parameter() -> None:
    """It requests some gradients only: hooks on the path are called, but not those on accumulated gradients."""
    baseline, model = critic(), critic()
    x = points()
    wanted = torch.autograd.grad(baseline(x).sum(), [x, *baseline.parameters()])
    with instrument.attach(model, RECORDS) as probe:
        given = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
        probe.end_step()
    assert all(map(torch.equal, given, wanted))
    assert all(parameter.grad is None for parameter in model.parameters())
    seen = probe.sink.frame("tensors").groupby("hook").size()
    assert seen["micro"] == len(list(model.parameters()))
    assert "sums" not in seen
    assert seen["tensor_output"] == len(list(model.modules()))
    assert any("post_accumulate_grad" in message for message in probe.warnings)


@pytest.mark.slow
def test_penalised_critic_trains_the_same_weights() -> None:
    """Two full steps: scores, penalty, accumulation of both, and the optimizer step."""

    def train(model: nn.Module, probe: Any = None) -> list[Tensor]:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(2):
            optimizer.zero_grad()
            x = points()
            (model(x).mean() - model(x.detach() * 0.5).mean()).backward()
            (10.0 * penalty(model, x)).backward()
            optimizer.step()
            if probe is not None:
                probe.end_step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    wanted = train(critic())
    model = critic()
    with instrument.attach(model, RECORDS) as probe:
        actual = train(model, probe)
    assert all(map(torch.equal, actual, wanted))
