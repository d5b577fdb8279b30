# python double_gradient.py
"""A hook on a tensor: the gradient of one layer's output is doubled, and so is all that comes before it."""

import torch
from torch import nn

import instrument


def gradients(hooks):
    """The norm of each weight's gradient after one backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
    with instrument.attach(model, hooks) as probe:
        model(torch.randn(16, 8)).sum().backward()
        probe.end_step()
    return {name: parameter.grad.norm().item() for name, parameter in model.named_parameters() if "weight" in name}


bare = gradients({})
doubled = gradients({"double": {"layers": "2", "kind": "tensor", "action": "scale", "factor": 2.0}})
print("weight     bare     with the hook on layer 2's output")
for name in bare:
    print(f"{name}  {bare[name]:7.3f}  {doubled[name]:7.3f}   x {doubled[name] / bare[name]:g}")
