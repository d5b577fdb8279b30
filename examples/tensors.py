# python tensors.py
"""Parameter, buffer and plain tensor: which one is trained, which one is only saved, and which one no hook receives."""

import torch
from torch import nn

import instrument


class Layer(nn.Module):
    """A module with a parameter, a buffer and a plain tensor."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("offset", torch.ones(3))
        self.plain = torch.ones(3)

    def forward(self, x):
        return self.weight * x + self.offset + self.plain


model = Layer()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
record = {"layers": ".", "action": "record"}
hooks = {
    "param": {**record, "kind": "step_post", "role": "param"},
    "gradient": {**record, "kind": "parameter_grad"},
    "buffer": {**record, "kind": "step_post", "role": "buffer"},
    "saved": {**record, "kind": "state_dict_post"},
}
with instrument.attach(model, hooks, optimizer=optimizer) as probe:
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    saved = model.state_dict()
    probe.end_step()

hook_names = probe.sink.frame("stats").groupby("path").hook.agg(", ".join)
for name in ("weight", "offset", "plain"):
    tensor = getattr(model, name)
    kind = "parameter" if name in dict(model.named_parameters()) else "buffer" if name in saved else "plain tensor"
    print(f"{name:<7} {kind:<13} trains: {tensor.requires_grad!s:<6} hooks: {hook_names.get(name, 'none')}")
