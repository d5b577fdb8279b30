# python shapes.py
"""Verbose execution: print the shapes of the input and output of each module during the forward pass."""

import torch
from torchvision.models import squeezenet1_1

import instrument


def show(tensor, context):
    """Print the module and the shape of the tensor, and return the tensor unchanged."""
    depth = 2 * (context.layer.count(".") + bool(context.layer))
    arrow = "->" if context.role == "output" else "  "
    print(f"{' ' * depth}{arrow} {context.layer or 'the model'}: {type(context.module).__name__} {list(tensor.shape)}")
    return tensor


model = squeezenet1_1(weights=None).eval()
hooks = {
    "enter": {"layers": "**", "kind": "forward_pre", "action": "modify", "fn": show},
    "leave": {"layers": "**", "kind": "forward", "action": "modify", "fn": show},
}
with torch.no_grad(), instrument.attach(model, hooks) as probe:
    model(torch.zeros(1, 3, 224, 224))
    probe.end_step()
