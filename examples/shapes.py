# python shapes.py
"""Verbose execution: what goes into each module and comes out of it, printed as the forward pass goes."""

import torch
from torchvision.models import squeezenet1_1

import instrument


def show(tensor, context):
    """Print where we are and what is there; give the tensor back as it is."""
    depth = 2 * (context.layer.count(".") + bool(context.layer))
    sign = "->" if context.role == "output" else "  "
    print(f"{' ' * depth}{sign} {context.layer or 'the model'}: {type(context.module).__name__} {list(tensor.shape)}")
    return tensor


model = squeezenet1_1(weights=None).eval()
hooks = {
    "enter": {"layers": "**", "kind": "forward_pre", "action": "modify", "fn": show},
    "leave": {"layers": "**", "kind": "forward", "action": "modify", "fn": show},
}
with torch.no_grad(), instrument.attach(model, hooks) as probe:
    model(torch.zeros(1, 3, 224, 224))
    probe.end_step()
