# python optimizer_steps.py
"""Hooks around the optimizer's step: the weight before and after it, its update, and what Adam remembers."""

import torch
from torch import nn

import instrument

torch.manual_seed(0)
model = nn.Linear(4, 1, bias=False)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
look = {"layers": ".", "action": "record", "stats": ["mean", "l2"]}
hooks = {
    "before": {**look, "kind": "step_pre", "role": "param"},
    "gradient": {**look, "kind": "step_pre", "role": "param_grad"},
    "update": {**look, "kind": "step_post", "role": "update"},
    "after": {**look, "kind": "step_post", "role": "param"},
    "exp_avg": {**look, "kind": "step_post", "role": "state.exp_avg"},
    "exp_avg_sq": {**look, "kind": "step_post", "role": "state.exp_avg_sq"},
}
with instrument.attach(model, hooks, optimizer=optimizer) as probe:
    for _ in range(4):
        optimizer.zero_grad()
        (model(torch.randn(32, 4)) - 1).square().mean().backward()
        optimizer.step()
        probe.end_step()

print(
    probe.sink.frame("stats").pivot_table(index="step", columns="hook", values="l2")[list(hooks)].round(4).to_string()
)
