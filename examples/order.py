# python order.py
"""Hooks of every kind on one small model, and the order in which they fire in a step."""

import torch
from torch import nn

import instrument
from instrument.spec.kinds import KINDS

fired = []


def note(tensor, context):
    """Write down where we are; give the tensor back as it is."""
    fired.append(f"{context.kind:<20} {context.role:<12} {context.layer or '.'}")
    return tensor


model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
optimizer = torch.optim.Adam(model.parameters())
hooks = {kind: {"layers": "*", "kind": kind, "action": "modify", "fn": note} for kind in KINDS if KINDS[kind].changes}
for name, spec in hooks.items():
    if name not in ("forward_pre", "forward", "full_backward_pre", "full_backward", "tensor"):
        spec["params"] = "weight"
hooks["loss"] = {"kind": "loss", "action": "modify", "fn": note}
hooks["state_dict_post"] = {**hooks["state_dict_post"], "layers": "0"}
hooks["load_state_dict_pre"] = {**hooks["load_state_dict_pre"], "layers": "0"}

with instrument.attach(model, hooks, optimizer=optimizer) as probe:
    loss = probe.loss(model(torch.randn(2, 3, requires_grad=True)).square().mean())
    loss.backward()
    optimizer.step()
    model.load_state_dict(model.state_dict())
    probe.end_step(loss=loss)

for number, line in enumerate(fired, start=1):
    print(f"{number:>3}  {line}")
