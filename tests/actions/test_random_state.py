from __future__ import annotations

import pytest
import torch
from hook_runs import run_step
from torch import Tensor, nn

from instrument import Context, HookError


def draw_globally(tensor: Tensor, context: Context) -> Tensor:
    return tensor + torch.randn_like(tensor)


def draw_from_generator(tensor: Tensor, context: Context) -> Tensor:
    return tensor + torch.randn(tensor.shape, generator=context.generator(tensor.device))


def run(function: str) -> None:
    hook = {"layers": ".", "kind": "forward", "action": "modify", "fn": {"_target_": f"{__name__}.{function}"}}
    run_step(nn.Linear(2, 2), {"mine": hook}, torch.zeros(1, 2))


def test_function_that_uses_global_random_state_is_refused() -> None:
    message = r"hook 'mine' \(forward\) on layer '.' at step 0 .*global random state.*generator"
    with pytest.raises(HookError, match=message):
        run("draw_globally")


def test_context_generator_leaves_the_global_state_unchanged() -> None:
    before = torch.get_rng_state()
    model_only = nn.Linear(2, 2)
    after_model = torch.get_rng_state()
    torch.set_rng_state(before)
    run("draw_from_generator")
    assert torch.equal(torch.get_rng_state(), after_model)
    assert model_only.weight.shape == (2, 2)
