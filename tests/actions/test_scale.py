"""Scale: multiplication by a factor."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hook_runs import run_step, scale

import instrument
from instrument.actions.scale import scale_channels
from instrument.config.parse import parse_hooks


@pytest.mark.parametrize("factor", [0.0, -2.0, 1e-3, 7])
def test_effect_contains_the_factor(factor: float) -> None:
    result, probe = run_step(torch.nn.Identity(), {"h": scale("forward", factor)}, torch.tensor([1.0, -2.0]))
    assert torch.equal(result, torch.tensor([1.0, -2.0]) * factor)
    assert probe.sink.records("effects")[0]["factor"] == factor


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_factor_is_not_rounded_to_the_dtype(dtype: torch.dtype) -> None:
    tensor = torch.linspace(-3.0, 3.0, 1001, dtype=torch.float64).to(dtype)
    wanted = (tensor.to(torch.promote_types(dtype, torch.float32)) * 0.1).to(dtype)
    assert torch.equal(scale_channels(tensor.unsqueeze(0), [0.1] * 1001, 1)[0], wanted)


@pytest.mark.spread(4)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("factor", [0.1, -0.0, 1e300, 1e-300])
def test_scaling_equals_a_product_with_a_number_in_every_bit(dtype: torch.dtype, factor: float) -> None:
    model = torch.nn.Identity()
    numbers = torch.cat([torch.linspace(-3.0, 3.0, 31), torch.tensor([math.nan, math.inf, -math.inf, 1e30, 1e-30])])
    with instrument.attach(model, {"h": scale("forward", factor)}):
        for tensor in (numbers, numbers.view(6, 6).t(), numbers[::2], numbers[0]):
            leaves = [tensor.to(dtype, copy=True).requires_grad_() for _ in range(2)]
            scaled, product = model(leaves[0] * 1), (leaves[1] * 1) * factor
            assert (scaled.dtype, scaled.stride()) == (dtype, product.stride())
            for result in (scaled, product):
                result.backward(torch.full_like(result, 0.3))
            gradients = (leaf.grad for leaf in leaves)
            assert len({repr(result.tolist()) for result in (scaled, product)}) == 1
            assert len({repr(gradient.tolist()) for gradient in gradients}) == 1


def test_quantize_and_l1_keep_float64_precision() -> None:
    tensor = torch.linspace(-1.0, 1.0, 255, dtype=torch.float64) * 1e200
    spec = {"layers": "**", "kind": "parameter_grad", "action": "modify"}
    hooks = parse_hooks({"q": {**spec, "fn": "quantize"}, "l1": {**spec, "fn": "l1", "coefficient": 0.1}})
    context: Any = SimpleNamespace(value=tensor[:1])
    torch.testing.assert_close(hooks["q"].function(None)(tensor, context), tensor, rtol=1e-12, atol=1e185)
    assert hooks["l1"].function(None)(tensor[:1] * 0, context).item() == -0.1
