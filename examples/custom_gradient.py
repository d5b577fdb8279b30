# python custom_gradient.py
"""Custom gradients without autograd code: straight-through estimation and gradient reversal."""

import torch
from torch import nn

import instrument


def output_and_gradient(hooks):
    """Return the output of a model and the gradient of its input, which is 1, 2, 3, 4 without hooks."""
    x = torch.tensor([-1.5, -0.2, 0.3, 1.1], requires_grad=True)
    model = nn.Sequential(nn.Identity())
    with instrument.attach(model, hooks) as probe:
        output = model(x)
        (output * torch.tensor([1.0, 2.0, 3.0, 4.0])).sum().backward()
        probe.end_step()
    return output.tolist(), x.grad.tolist()


sign = {"layers": "0", "kind": "forward", "action": "modify", "fn": "sign"}
cases = {
    "no hooks": {},
    "sign": {"sign": sign},
    "sign, straight-through": {"sign": {**sign, "straight_through": True}},
    "reversal": {"reverse": {"layers": "0", "kind": "forward", "action": "scale", "factor": 0.5, "reverse": True}},
}
for name, hooks in cases.items():
    output, grad = output_and_gradient(hooks)
    print(f"{name:<23} output {[round(value, 2) for value in output]}  gradient {grad}")
