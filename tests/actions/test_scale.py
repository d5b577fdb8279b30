"""Scale: multiplication by a number."""

from __future__ import annotations

import pytest
import torch

import instrument
from instrument.actions.scale import scale


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_scaling_keeps_shape_dtype_and_graph(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 2, dtype=dtype, requires_grad=True)
    result = scale(tensor, 0.5)
    assert (result.shape, result.dtype) == (tensor.shape, dtype)
    assert torch.equal(result, tensor / 2)
    result.sum().backward()
    assert torch.equal(tensor.grad, torch.full_like(tensor, 0.5))


@pytest.mark.parametrize("factor", [0.0, -2.0, 1e-3, 7])
def test_the_factor_is_in_the_effect(factor: float) -> None:
    model = torch.nn.Identity()
    spec = {"layers": ".", "kind": "forward", "action": "scale", "factor": factor}
    with instrument.attach(model, {"h": spec}) as probe:
        result = model(torch.tensor([1.0, -2.0]))
        probe.end_step()
    assert torch.equal(result, torch.tensor([1.0, -2.0]) * factor)
    assert probe.sink.records("effects")[0]["factor"] == factor
