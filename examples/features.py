# python features.py
"""Feature extraction: record the outputs of `layer4` and `avgpool` of ResNet-50 without changing its code."""

import torch
from torchvision.models import resnet50

import instrument

torch.manual_seed(0)
model = resnet50(weights=None).eval()  # weights="DEFAULT" downloads trained weights
images = torch.randn(4, 3, 224, 224)
hooks = {
    "features": {
        "layers": ["layer4", "avgpool"],
        "kind": "forward",
        "action": "record",
        "stats": "none",
        "tensors": True,
    }
}
with torch.no_grad(), instrument.attach(model, hooks, out="runs/features") as probe:
    model(images)
    probe.end_step()

run = instrument.load("runs/features")
for layer in ("layer4", "avgpool"):
    features = run.tensors(layer=layer)["values"][0]  # a NumPy array
    print(f"{layer}: {features.shape}, mean {features.mean():.4f}, {(features == 0).mean():.0%} zeros")
