"""Sparse gradients, as from `nn.Embedding(sparse=True)`: entries are changed, or the hook reports why not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import instrument
from instrument.errors import HookError

INDICES = torch.tensor([[1, 1, 4, 7]])  # one index twice: the gradient has an entry for each


def weight_after(spec: dict[str, Any], *, sparse: bool, kind: str) -> tuple[torch.Tensor, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 3, sparse=sparse), nn.Linear(3, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instrument.attach(model, {"h": {"layers": "**", "kind": kind, **spec}}, optimizer=optimizer) as probe:
        for _ in range(2):
            optimizer.zero_grad()
            model(INDICES).square().sum().mul(40.0).backward()
            optimizer.step()
            probe.end_step()
    return model[0].weight.detach(), probe.sink.records("effects")


@pytest.mark.parametrize("kind", ["parameter_grad", "post_accumulate_grad", "parameter_grad_micro"])
@pytest.mark.parametrize(
    "spec",
    [
        {"action": "clip", "value": 0.5},
        {"action": "clip", "min": -0.25, "max": 1.0},
        {"action": "clip", "norm": 0.5, "scope": "tensor"},
        {"action": "scale", "factor": 0.5},
        {"action": "modify", "fn": "zero"},
        {"action": "modify", "fn": "sign"},
        {"action": "modify", "fn": "quantize", "to": "int8"},
    ],
    ids=str,
)
def test_sparse_entries_change_as_in_a_dense_gradient(spec: dict[str, Any], kind: str) -> None:
    sparse_weight, effects = weight_after(spec, sparse=True, kind=kind)
    dense_weight, dense_effects = weight_after(spec, sparse=False, kind=kind)
    assert torch.allclose(sparse_weight, dense_weight, rtol=1e-6, atol=0)
    assert len(effects) == len(dense_effects) == 6
    for row, dense in zip(effects, dense_effects, strict=True):
        assert (row["layer"], row["numel"], row["changed"]) == (dense["layer"], dense["numel"], dense["changed"])
        assert row["norm_after"] == pytest.approx(dense["norm_after"], rel=1e-5)


def test_total_norm_includes_sparse_gradients() -> None:
    spec = {"action": "clip", "norm": 0.5}
    sparse_weight, effects = weight_after(spec, sparse=True, kind="parameter_grad")
    dense_weight, _ = weight_after(spec, sparse=False, kind="parameter_grad")
    assert torch.allclose(sparse_weight, dense_weight, rtol=1e-6, atol=0)
    norms = [row["norm_after"] for row in effects if row["step"] == 0]
    assert sum(norm**2 for norm in norms) ** 0.5 == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize(
    "spec",
    [
        {"action": "clip", "min": 0.1},
        {"action": "clip", "quantile": 0.9},
        {"action": "scale", "factor": [1.0, 2.0, 3.0], "dim": 1},
        {"action": "modify", "fn": "noise", "std": 0.1},
        {"action": "modify", "fn": "l2", "coefficient": 0.1},
    ],
    ids=str,
)
def test_function_that_needs_a_dense_tensor_is_reported(spec: dict[str, Any]) -> None:
    with pytest.raises(HookError, match=r"'h' \(parameter_grad\) on layer '0'.*requires a dense tensor.*sparse=False"):
        weight_after({**spec, "types": "Embedding"}, sparse=True, kind="parameter_grad")
