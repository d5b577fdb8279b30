# python custom_gradient.py
"""Custom gradients without a line of autograd: straight-through rounding, and reversal."""

import torch
from torch import nn

import instrument


def gradient(hooks):
    """What comes out of a small model, and the gradient that its input gets: it is to be as large as 1, 2, 3, 4."""
    x = torch.tensor([-1.5, -0.2, 0.3, 1.1], requires_grad=True)
    model = nn.Sequential(nn.Identity())
    with instrument.attach(model, hooks) as probe:
        output = model(x)
        (output * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
        probe.end_step()
    return output.tolist(), x.grad.tolist()


sign = {"layers": "0", "kind": "forward", "action": "modify", "fn": "sign"}
cases = {
    "nothing": {},
    "sign": {"sign": sign},
    "sign, straight-through": {"sign": {**sign, "straight_through": True}},
    "reversal": {"reverse": {"layers": "0", "kind": "forward", "action": "scale", "factor": 0.5, "reverse": True}},
}
for name, hooks in cases.items():
    output, grad = gradient(hooks)
    print(f"{name:<23} output {[round(value, 2) for value in output]}  gradient {grad}")
