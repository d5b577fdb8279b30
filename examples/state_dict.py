# python state_dict.py
"""Hooks on saving and loading: round saved weights to int8, and halve loaded weights."""

import torch
from torch import nn

import instrument

torch.manual_seed(0)
model = nn.Linear(64, 64)
weight = model.weight.detach().clone()
hooks = {
    "saved": {"layers": ".", "kind": "state_dict_post", "action": "modify", "fn": "quantize", "to": "int8"},
    "loaded": {"layers": ".", "kind": "load_state_dict_pre", "params": "weight", "action": "scale", "factor": 0.5},
}
with instrument.attach(model, hooks) as probe:
    saved = model.state_dict()
    print("model weights are unchanged after saving:", torch.equal(model.weight, weight))
    print("different values in the file:", saved["weight"].unique().numel(), "of", weight.unique().numel())
    print("largest rounding error:", f"{(saved['weight'] - weight).abs().max():.4f}")
    given = {"weight": weight, "bias": model.bias.detach().clone()}
    model.load_state_dict(given)
    print("loaded weights are half of the given weights:", torch.equal(model.weight, weight * 0.5))
    print("given weights are unchanged after loading:", torch.equal(given["weight"], weight))
    probe.end_step()
