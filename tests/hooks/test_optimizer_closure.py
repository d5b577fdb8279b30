"""Optimizers with a closure: gradients exist after each run of the closure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hook_runs import tensors_by
from torch import nn

import instrument

KEEP = {"layers": ".", "params": "weight", "action": "record", "stats": "none", "tensors": True}


def train(make: Callable[[Any], torch.optim.Optimizer], specs: Any, by_name: bool = False) -> tuple[Any, Any, Any]:
    """Run two steps of a small regression; return the probe, the gradient after each closure call, and the model."""
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    inputs, targets = torch.randn(16, 3), torch.randn(16, 1)
    optimizer = make(model.parameters())
    gradients: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(inputs) - targets).square().mean()
        loss.backward()
        gradients.append(model.weight.grad.clone())
        return loss

    with instrument.attach(model, specs, optimizer=optimizer) as probe:
        for _ in range(2):
            optimizer.step(closure=closure) if by_name else optimizer.step(closure)
            probe.end_step()
    return probe, gradients, model


@pytest.mark.parametrize("by_name", [False, True], ids=["positional", "by name"])
@pytest.mark.parametrize(("kind", "role"), [("parameter_grad", "param_grad"), ("step_pre", "param_grad")])
def test_every_lbfgs_gradient_is_recorded_and_numbered(kind: str, role: str, by_name: bool) -> None:
    specs = {"g": {**KEEP, "kind": kind, "role": role}}
    probe, gradients, _ = train(lambda parameters: torch.optim.LBFGS(parameters, max_iter=4), specs, by_name)
    rows = probe.sink.records("tensors")
    assert len(rows) == len(gradients) > 4
    assert all(torch.equal(row["values"], wanted) for row, wanted in zip(rows, gradients, strict=True))
    first = [row["call"] for row in rows if row["step"] == 0]
    assert first == list(range(len(first)))
    assert not probe.warnings


def test_gradient_changed_after_a_closure_reaches_the_optimizer() -> None:
    scale = {"half": {"layers": ".", "kind": "parameter_grad", "action": "scale", "factor": 0.5}}
    _, _, halved = train(lambda parameters: torch.optim.SGD(parameters, lr=0.2), scale)
    _, _, wanted = train(lambda parameters: torch.optim.SGD(parameters, lr=0.1), {})
    assert torch.equal(halved.weight, wanted.weight)
    assert torch.equal(halved.bias, wanted.bias)


def test_step_pre_records_the_parameter_before_the_closure() -> None:
    kinds = {"before": ("step_pre", "param"), "after": ("step_post", "param"), "update": ("step_post", "update")}
    specs = {name: {**KEEP, "kind": kind, "role": role} for name, (kind, role) in kinds.items()}
    probe, _, _ = train(lambda parameters: torch.optim.LBFGS(parameters, max_iter=2), specs)
    rows = tensors_by(probe, "hook", "step")
    assert len(rows) == 6
    assert torch.equal(rows["before", 1], rows["after", 0])
    for step in range(2):
        assert torch.equal(rows["update", step], rows["after", step] - rows["before", step])
