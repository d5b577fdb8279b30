# python patching.py
"""Activation patching: measure the effect of each layer's activations on the loss.

Run A records the activations of the trained model. Run B adds noise to the input of the same model. For each layer, some
activations of B are replaced by those of A. The loss shows how much of the increase this patch recovers.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import instrument

images, targets = (torch.tensor(array) for array in load_digits(return_X_y=True))
images, targets = (images.float() / 16)[:500], targets[:500]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(100):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), targets).backward()
    optimizer.step()


def loss_with(hooks, inputs, **options):
    """Return the loss of one forward pass with hooks."""
    with torch.no_grad(), instrument.attach(model, hooks, **options) as probe:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        probe.end_step(loss=loss)
    return loss.item()


layers = [name for name, module in model.named_modules() if name]
record = {"kind": "forward", "action": "record", "stats": "none", "tensors": True}
clean = loss_with({"record": {"layers": layers, **record}}, images, out="runs/patching_a")
noisy = images + 0.5 * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
damaged = loss_with({}, noisy)
print(f"clean {clean:.4f}, damaged {damaged:.4f}")
for layer in layers:
    units = ":, 0:16" if layer != "4" else ":, 0:5"  # layer 4 has only 10 units
    patch = {
        "layers": layer,
        "kind": "forward",
        "action": "modify",
        "fn": "patch",
        "run": "runs/patching_a",
        "slice": units,
    }
    patched = loss_with({"patch": patch}, noisy, out=f"runs/patching_b/{layer}")
    name, recovered = type(model[int(layer)]).__name__, (damaged - patched) / (damaged - clean)
    print(f"layer {layer} {name:<7} {units:<8} loss {patched:.4f}, recovers {recovered:.0%}")

patched_runs = instrument.load("runs/patching_b")  # the runs of all layers
print(patched_runs.metrics.set_index("run").loss.round(4).to_string())
