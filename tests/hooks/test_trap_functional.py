"""Trap: torch.func transforms call a module with tensors that hooks cannot read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import instrument
from instrument.tables.reasons import TRANSFORMED

KINDS = {
    "seen": {"kind": "forward", "action": "record", "tensors": True},
    "before": {"kind": "forward_pre", "action": "record"},
    "own": {"kind": "full_backward", "action": "record"},
    "flow": {"kind": "tensor", "action": "scale", "factor": 2.0},
}


@pytest.mark.spread(1)
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "vmap of grad"])
def test_transform_result_is_unchanged_and_reported_in_coverage(transform: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    batch = torch.randn(4, 3)

    def call() -> torch.Tensor:
        def total(x: torch.Tensor) -> torch.Tensor:
            return model(x).sum()

        calls = {
            "vmap": lambda: torch.func.vmap(model)(batch),
            "grad": lambda: torch.func.grad(total)(batch),
            "jvp": lambda: torch.func.jvp(model, (batch,), (torch.ones_like(batch),))[1],
            "vmap of grad": lambda: torch.func.vmap(torch.func.grad(total))(batch),
        }
        return calls[transform]()

    wanted = call()
    specs = {name: {"layers": "*", **spec} for name, spec in KINDS.items()}
    with instrument.attach(model, specs) as probe:
        assert torch.equal(call(), wanted)
        probe.end_step()
        model(batch).sum().backward()  # outside a transform hooks fire as usual
        probe.end_step()
    assert {(row["expected"], row["fired"], row["cause"]) for row in probe.coverage() if row["hook"] != "own"} == {
        (2, 1, TRANSFORMED)
    }
    assert sum("torch.func" in message for message in probe.warnings) == len(KINDS)
