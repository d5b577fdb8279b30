# python double_gradient.py
"""A hook on a tensor: double the gradient of one layer's output, and thereby all gradients of earlier layers."""

import torch
from torch import nn

import instrument


def gradients(hooks):
    """Return the norm of each weight's gradient after one backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    with instrument.attach(model, hooks) as probe:
        model(torch.randn(16, 8)).sum().backward()
        probe.end_step()
    return {name: parameter.grad.norm().item() for name, parameter in model.named_parameters() if "weight" in name}


baseline = gradients({})
doubled = gradients({"double": {"layers": "2", "kind": "tensor", "action": "scale", "factor": 2.0}})
print("weight   baseline  with the hook on layer 2's output")
for name in baseline:
    print(f"{name}  {baseline[name]:7.3f}  {doubled[name]:7.3f}   x {doubled[name] / baseline[name]:g}")
