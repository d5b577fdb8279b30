# python weight_decay.py
"""L2 by a hook on the gradient equals the optimizer's weight decay; L1 by a hook equals a penalty in the loss."""

import torch
from torch import nn

import instrument


def train(hooks=None, weight_decay=0.0, l1=0.0):
    """Return the weights after ten steps of SGD."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=weight_decay)
    with instrument.attach(model, hooks or {}, optimizer=optimizer) as probe:
        for _ in range(10):
            optimizer.zero_grad()
            loss = model(torch.randn(32, 8)).square().mean()
            loss = loss + l1 * sum(parameter.abs().sum() for parameter in model.parameters())
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


penalty = {"layers": "**", "kind": "parameter_grad", "action": "modify", "coefficient": 0.01}
by_hook, by_optimizer = train({"decay": {**penalty, "fn": "l2"}}), train(weight_decay=0.01)
print(f"L2 by hook and weight_decay: {'bit-identical' if by_hook.equal(by_optimizer) else 'different'}")
by_hook, by_loss = train({"sparse": {**penalty, "fn": "l1"}}), train(l1=0.01)
print(f"L1 by hook and in the loss:  largest difference {(by_hook - by_loss).abs().max():.1e}")
print(f"no penalty and weight_decay: largest difference {(train() - by_optimizer).abs().max():.1e}")
