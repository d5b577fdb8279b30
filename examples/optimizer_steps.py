# python optimizer_steps.py
"""Hooks around the optimizer's step: the weight before and after it, its update, and the state of Adam."""

import torch
from torch import nn

import instrument

torch.manual_seed(0)
model = nn.Linear(4, 1, bias=False)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
record = {"layers": ".", "action": "record", "stats": ["mean", "l2"]}
hooks = {
    "before": {**record, "kind": "step_pre", "role": "param"},
    "gradient": {**record, "kind": "step_pre", "role": "param_grad"},
    "update": {**record, "kind": "step_post", "role": "update"},
    "after": {**record, "kind": "step_post", "role": "param"},
    "exp_avg": {**record, "kind": "step_post", "role": "state.exp_avg"},
    "exp_avg_sq": {**record, "kind": "step_post", "role": "state.exp_avg_sq"},
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
