"""The gradients that hooks record around the clip of a trainer, compared with the same clip by PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import instrument


def keep_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Return a dictionary that receives a copy of each accumulated gradient, by the name of its parameter."""
    complete: dict[str, Tensor] = {}

    def keep(parameter: Tensor, name: str) -> None:
        complete[name] = parameter.grad.clone()

    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda each, name=name: keep(each, name))
    return complete


def check_recorded(probe: instrument.AttachedProbe, step: int, complete: dict[str, Tensor], max_norm: float) -> None:
    """Assert that the hook `raw` recorded the complete gradients of a step, and `used` the clipped ones."""
    recorded = {
        hook: {f"{row.layer}.{row.path}": torch.tensor(row["values"]) for _, row in found.iterrows()}
        for hook, found in probe.tensors(step=step).groupby("hook")
    }
    assert recorded["raw"].keys() == complete.keys()
    assert all(torch.equal(recorded["raw"][name], gradient) for name, gradient in complete.items())
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in complete.values()]
    for parameter, gradient in zip(parameters, complete.values(), strict=True):
        parameter.grad = gradient.clone()
    clip_grad_norm_(parameters, max_norm)
    for parameter, name in zip(parameters, complete, strict=True):
        assert torch.equal(recorded["used"][name], parameter.grad)
