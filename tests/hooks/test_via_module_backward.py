"""`via: module`: PyTorch's module hooks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import instrument


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Bilinear(3, 3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.mix(x, x * 2), x.tanh()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.two = Two()
        self.shared = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.two(self.first(x))
        return self.shared(self.shared(a)).sum() + b.sum()


def specs(via: str) -> dict[str, dict[str, Any]]:
    hook_points = [
        ("full_backward", "grad_input"),
        ("full_backward", "grad_output"),
        ("full_backward_pre", "grad_output"),
    ]
    every = {"layers": "**", "action": "record", "stats": "none", "tensors": True, "via": via}
    return {f"{kind}_{role}": {**every, "kind": kind, "role": role} for kind, role in hook_points}


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_module_hooks_equal_tensor_hooks(needs_gradient: bool) -> None:
    model, batch = Net(), torch.randn(4, 3)
    seen, coverage = {}, {}
    for via in ("tensor", "module"):
        with instrument.attach(copy.deepcopy(model), specs(via)) as probe:
            probe.plan.layers.model(batch.clone().requires_grad_(needs_gradient)).backward()
            probe.end_step()
        rows = probe.sink.records("tensors")
        seen[via] = {(row["hook"], row["layer"], row["path"], row["call"]): row["values"] for row in rows}
        coverage[via] = [(row["hook"], row["layer"], row["expected"], row["fired"]) for row in probe.coverage()]
        assert len(seen[via]) == len(rows)
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
    spec = {"layers": "**", "kind": kind, "action": "record", "via": "module", "start": 1}

    def train() -> None:
        with instrument.attach(model, {"mine": spec}) as probe:
            for _ in range(3):
                model(torch.randn(2, 3)).sum().backward()
                probe.end_step()

    with pytest.raises(instrument.HookError) as caught:
        train()
    for part in ("'mine'", kind, "step 1", "'0' (Linear)", "via"):
        assert part in str(caught.value)
    assert isinstance(caught.value.__cause__, RuntimeError)


def test_other_runtime_errors_are_unchanged() -> None:
    spec = {"layers": ".", "kind": "full_backward", "action": "record", "via": "module"}

    def train() -> None:
        with instrument.attach(nn.Linear(3, 3), {"mine": spec}) as probe:
            probe.plan.layers.model(torch.randn(2, 4))

    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        train()


def test_unscheduled_step_registers_no_hooks() -> None:
    model = nn.Linear(2, 2)
    spec = {"layers": ".", "kind": "full_backward", "action": "record", "via": "module", "every": 2, "start": 1}
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
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"a": x * 2} if isinstance(output, dict) else [x * 2]

    spec = {"layers": ".", "kind": "full_backward", "action": "record", "via": "module"}
    with instrument.attach(Odd(), {"h": spec}) as probe:
        with pytest.warns(UserWarning, match="should be a Tensor or a tuple"):
            value = probe.plan.layers.model(torch.ones(1, requires_grad=True))
        (value["a"] if isinstance(value, dict) else value[0]).sum().backward()
        probe.end_step()
    (row,) = probe.coverage()
    assert (row["expected"], row["fired"]) == (1, 0)
    assert "PyTorch's own hook sees only" in row["cause"]


def test_keyword_argument_ignored_by_pytorch_is_reported_in_coverage() -> None:
    class Doubled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 2

    spec = {"layers": ".", "kind": "full_backward", "role": "grad_input", "action": "record", "via": "module"}
    with instrument.attach(Doubled(), {"h": spec}) as probe:
        with pytest.warns(UserWarning, match="no inputs require gradients"):
            probe.plan.layers.model(x=torch.ones(1, requires_grad=True)).sum().backward()
        probe.end_step()
    (row,) = probe.coverage()
    assert (row["expected"], row["fired"]) == (1, 0)
    assert "PyTorch's own hook sees only tensors that are positional arguments" in row["cause"]
