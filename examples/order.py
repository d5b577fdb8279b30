# python order.py
"""Hooks of every kind on one small model, and the order in which they fire in a step."""

import torch
from torch import nn

import instrument
from instrument.tables.kinds import KINDS

model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters())
kinds = [kind for kind in KINDS if kind != "collective"]  # which requires several processes
hooks = {kind: {"layers": "*", "kind": kind, "action": "record", "stats": ["l2"]} for kind in kinds}
for kind, spec in hooks.items():
    if KINDS[kind].family in ("parameter", "optimizer", "state_dict"):
        spec["params"] = "weight"
    if KINDS[kind].of_functions:
        spec["functions"] = "*"
    if KINDS[kind].family == "loss":
        del spec["layers"]  # a loss hook has no layers

with instrument.attach(model, hooks, optimizer=optimizer) as probe:
    loss = probe.loss(model(torch.randn(2, 3, requires_grad=True)).square().mean())
    loss.backward()
    optimizer.step()
    model.load_state_dict(model.state_dict())
    probe.end_step(loss=loss)

for number, row in enumerate(probe.sink.records("stats"), start=1):
    print(f"{number:>3}  {row['kind']:<20} {row['role']:<12} {row['layer'] or '.'}")
