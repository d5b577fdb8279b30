"""`via: module`: PyTorch's module hooks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hook_runs import Calls, keep, record, run_step, run_steps, tensors_by
from torch import Tensor, nn

import instrument


def net() -> nn.Module:
    def forward(first: nn.Module, two: nn.Module, shared: nn.Module, x: Tensor) -> Tensor:
        a, b = two(first(x))
        return shared(shared(a)).sum() + b.sum()

    two = Calls(lambda mix, x: (mix(x, x * 2), x.tanh()), mix=nn.Bilinear(3, 3, 2))
    return Calls(forward, first=nn.Linear(3, 3), two=two, shared=nn.Linear(2, 2))


def specs(via: str) -> dict[str, dict[str, Any]]:
    hook_points = (
        ("full_backward", "grad_input"),
        ("full_backward", "grad_output"),
        ("full_backward_pre", "grad_output"),
    )
    return {f"{kind}_{role}": keep(kind, "**", role=role, via=via) for kind, role in hook_points}


@pytest.mark.spread(1)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_module_hooks_equal_tensor_hooks(needs_gradient: bool) -> None:
    model, batch = net(), torch.randn(4, 3)
    seen, coverage = {}, {}
    for via in ("tensor", "module"):
        inputs = batch.clone().requires_grad_(needs_gradient)
        _, probe = run_step(copy.deepcopy(model), specs(via), inputs, loss=torch.sum)
        seen[via] = tensors_by(probe, "hook", "layer", "path", "call")
        coverage[via] = [(row["hook"], row["layer"], row["expected"], row["fired"]) for row in probe.coverage()]
        assert probe.sink.rows["events"] == []
    assert seen["tensor"].keys() == seen["module"].keys()
    assert all(torch.equal(seen["tensor"][key], seen["module"][key]) for key in seen["tensor"])
    assert ("full_backward_grad_output", "two", "1", 0) in seen["module"]
    assert coverage["tensor"] == coverage["module"]


@pytest.mark.parametrize("kind", ["full_backward", "full_backward_pre"])
@pytest.mark.parametrize(
    "tail", [nn.ReLU(inplace=True), nn.Sequential(nn.Identity(), nn.ReLU(inplace=True))], ids=["relu", "nested"]
)
def test_in_place_operation_is_reported_with_its_location(kind: str, tail: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(3, 3), tail)
    spec = record(kind, "**", via="module", start=1)
    with pytest.raises(instrument.HookError) as caught:
        run_steps(model, {"mine": spec}, lambda: model(torch.randn(2, 3)).sum().backward(), 3)
    for part in ("'mine'", kind, "step 1", "'0' (Linear)", "via"):
        assert part in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_other_runtime_errors_are_unchanged() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run_step(nn.Linear(3, 3), {"mine": record("full_backward", via="module")}, torch.randn(2, 4))


def test_unscheduled_step_registers_no_hooks() -> None:
    model = nn.Linear(2, 2)
    spec = record("full_backward", via="module", every=2, start=1)
    registered = []
    with instrument.attach(model, {"h": spec}) as probe:
        for _ in range(4):
            registered.append(len(model._backward_hooks) + len(model._backward_pre_hooks) + len(model._forward_hooks))
            model(torch.ones(1, 2, requires_grad=True)).sum().backward()
            probe.end_step()
    assert registered == [0, 3, 0, 3]
    assert [row["step"] for row in probe.sink.records("stats")] == [1, 3]


@pytest.mark.parametrize("output", [{"a": None}, [None]], ids=["dict", "list"])
def test_output_ignored_by_pytorch_is_reported_in_coverage(output: Any) -> None:
    odd = Calls(lambda x: {"a": x * 2} if isinstance(output, dict) else [x * 2])
    key = "a" if isinstance(output, dict) else 0
    x = torch.ones(1, requires_grad=True)
    with pytest.warns(UserWarning, match="should be a Tensor or a tuple"):
        _, probe = run_step(odd, {"h": record("full_backward", via="module")}, x, loss=lambda value: value[key])
    (row,) = probe.coverage()
    assert (row["expected"], row["fired"]) == (1, 0)
    assert "PyTorch's own hook sees only" in row["cause"]


def test_keyword_argument_ignored_by_pytorch_is_reported_in_coverage() -> None:
    spec = record("full_backward", role="grad_input", via="module")
    with pytest.warns(UserWarning, match="no inputs require gradients"):
        _, probe = run_step(Calls(lambda x: x * 2), {"h": spec}, x=torch.ones(1, requires_grad=True), loss=torch.sum)
    (row,) = probe.coverage()
    assert (row["expected"], row["fired"]) == (1, 0)
    assert "PyTorch's own hook sees only tensors that are positional arguments" in row["cause"]
