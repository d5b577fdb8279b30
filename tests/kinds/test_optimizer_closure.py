"""An optimizer that is given a closure: its gradients are there when the closure has run, each time that it does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import instrument

KEEP = {"layers": ".", "params": "weight", "action": "record", "stats": "none", "tensors": True}


def train(make: Callable[[Any], torch.optim.Optimizer], specs: Any, by_name: bool = False) -> tuple[Any, Any, Any]:
    """Two steps of a small regression; the probe, what each call of the closure left, and the model."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    inputs, targets = torch.randn(16, 3), torch.randn(16, 1)
    optimizer = make(model.parameters())
    left: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        left.append(model.weight.grad.clone())
        return loss

    with instrument.attach(model, specs, optimizer=optimizer) as probe:
        for _ in range(2):
            optimizer.step(closure=closure) if by_name else optimizer.step(closure)
            probe.end_step()
    return probe, left, model


@pytest.mark.parametrize("by_name", [False, True], ids=["positional", "by name"])
@pytest.mark.parametrize(("kind", "role"), [("parameter_grad", "param_grad"), ("step_pre", "param_grad")])
def test_each_gradient_of_lbfgs_is_seen_and_numbered(kind: str, role: str, by_name: bool) -> None:
    probe, left, _ = train(
        lambda parameters: torch.optim.LBFGS(parameters, max_iter=4),
        {"g": {**KEEP, "kind": kind, "role": role}},
        by_name,
    )
    rows = probe.sink.records("tensors")
    assert len(rows) == len(left) > 4
    assert all(torch.equal(row["values"], wanted) for row, wanted in zip(rows, left, strict=True))
    first = [row["call"] for row in rows if row["step"] == 0]
    assert first == list(range(len(first)))
    assert not probe.warnings


def test_what_is_changed_behind_a_closure_is_what_the_optimizer_uses() -> None:
    scale = {"half": {"layers": ".", "kind": "parameter_grad", "action": "scale", "factor": 0.5}}
    _, _, halved = train(lambda parameters: torch.optim.SGD(parameters, lr=0.2), scale)
    _, _, wanted = train(lambda parameters: torch.optim.SGD(parameters, lr=0.1), {})
    assert torch.equal(halved.weight, wanted.weight)
    assert torch.equal(halved.bias, wanted.bias)


def test_the_parameter_at_step_pre_is_the_one_before_the_closure() -> None:
    probe, _, _ = train(
        lambda parameters: torch.optim.LBFGS(parameters, max_iter=2),
        {
            "before": {**KEEP, "kind": "step_pre", "role": "param"},
            "after": {**KEEP, "kind": "step_post", "role": "param"},
            "update": {**KEEP, "kind": "step_post", "role": "update"},
        },
    )
    rows = {(row["hook"], row["step"]): row["values"] for row in probe.sink.records("tensors")}
    assert len(rows) == 6
    assert torch.equal(rows["before", 1], rows["after", 0])
    for step in range(2):
        assert torch.equal(rows["update", step], rows["after", step] - rows["before", step])
