# python tensors.py
"""Parameter, buffer and plain tensor told apart: what trains, what is only saved, and what PyTorch does not know of."""

import torch
from torch import nn

import instrument


class Layer(nn.Module):
    """One of each."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("offset", torch.ones(3))
        self.plain = torch.ones(3)

    def forward(self, x):
        return self.weight * x + self.offset + self.plain


model = Layer()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
look = {"layers": ".", "action": "record"}
hooks = {
    "param": {**look, "kind": "step_post", "role": "param"},
    "gradient": {**look, "kind": "parameter_grad"},
    "buffer": {**look, "kind": "step_post", "role": "buffer"},
    "saved": {**look, "kind": "state_dict_post"},
}
with instrument.attach(model, hooks, optimizer=optimizer) as probe:
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    saved = model.state_dict()
    probe.end_step()

seen = probe.sink.frame("stats").groupby("path").hook.agg(", ".join)
for name in ("weight", "offset", "plain"):
    tensor = getattr(model, name)
    kind = "parameter" if name in dict(model.named_parameters()) else "buffer" if name in saved else "plain tensor"
    print(f"{name:<7} {kind:<13} trains: {tensor.requires_grad!s:<6} hooks: {seen.get(name, 'none can see it')}")
