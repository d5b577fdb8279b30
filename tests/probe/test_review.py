"""Regression tests for problems found in a review."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import instrument

LOOK = {"layers": "**", "kind": "forward", "action": "record"}


def test_nested_tensors_are_recorded() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    inputs, mask = torch.randn(2, 4, 8), torch.tensor([[False] * 4, [False, False, True, True]])
    with torch.no_grad():
        baseline = model(inputs, src_key_padding_mask=mask)
        with instrument.attach(model, {"f": LOOK}) as probe:
            assert torch.allclose(model(inputs, src_key_padding_mask=mask), baseline, atol=1e-5)
            probe.end_step()
    assert all(row["nan_count"] == 0 for row in probe.sink.records("stats"))


def test_clip_uses_only_parameters_of_the_optimizer() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"g": nn.Linear(2, 2), "d": nn.Linear(2, 2)})
    optimizer = torch.optim.SGD(model["g"].parameters(), lr=0.1)
    hook = {"layers": "**", "kind": "parameter_grad", "action": "clip", "norm": 0.1}
    with instrument.attach(model, {"tame": hook}, optimizer=optimizer) as probe:
        (model["d"](model["g"](torch.ones(4, 2))) * 100).sum().backward()
        untouched = model["d"].weight.grad.clone()
        optimizer.step()
        probe.end_step()
    assert torch.equal(model["d"].weight.grad, untouched)
    norm = torch.nn.utils.get_total_norm([p.grad for p in model["g"].parameters() if p.grad is not None])
    assert norm.item() == pytest.approx(0.1, rel=1e-3)
    causes = {row["cause"] for row in probe.coverage() if row["layer"] == "d"}
    assert causes == {"the optimizer does not hold this parameter"}
