# python patching.py
"""Activation patching: which layer carries what the model has learnt?

Run A is the trained model, its activations recorded. Run B is the same model with noise on its input; layer by layer,
what B computes is replaced by what was recorded in A, and the loss tells how much of the damage that mends.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import instrument

images, targets = (torch.tensor(part) for part in load_digits(return_X_y=True))
images, targets = (images.float() / 16)[:500], targets[:500]

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(100):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images), targets).backward()
    optimizer.step()


def loss_with(hooks, given, **more):
    """The loss of one forward pass under hooks."""
    with torch.no_grad(), instrument.attach(model, hooks, **more) as probe:
        loss = nn.functional.cross_entropy(model(given), targets)
        probe.end_step(loss=loss)
    return loss.item()


layers = [name for name, module in model.named_modules() if name]
keep = {"kind": "forward", "action": "record", "stats": "none", "tensors": True}
clean = loss_with({"kept": {"layers": layers, **keep}}, images, out="runs/patching_a")
noisy = images + 0.5 * torch.randn(images.shape, generator=torch.Generator().manual_seed(1))
damaged = loss_with({}, noisy)
print(f"clean {clean:.4f}, damaged {damaged:.4f}")
for layer in layers:
    half = ":, 0:16" if layer != "4" else ":, 0:5"  # half of the units, or a part of them
    patch = {
        "layers": layer,
        "kind": "forward",
        "action": "modify",
        "fn": "patch",
        "run": "runs/patching_a",
        "slice": half,
    }
    mended = loss_with({"patch": {**patch, "slice": half}}, noisy, out=f"runs/patching_b/{layer}")
    name, share = type(model[int(layer)]).__name__, (damaged - mended) / (damaged - clean)
    print(f"layer {layer} {name:<7} {half:<8} loss {mended:.4f}, mends {share:.0%}")

effects = instrument.load("runs/patching_b")  # all of run B at once, in pandas
print(effects.metrics.set_index("run").loss.round(4).to_string())
