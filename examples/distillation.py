# python distillation.py
"""Distillation (Hinton et al. 2015): a small student learns from the recorded logits of a teacher, without labels.

The teacher runs once. Its logits are the dataset of the student.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import instrument

images, digits = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 16
TEMPERATURE = 4.0

torch.manual_seed(0)
teacher = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.Adam(teacher.parameters(), lr=0.005)
for _ in range(100):
    optimizer.zero_grad()
    nn.functional.cross_entropy(teacher(images[:1400]), digits[:1400]).backward()
    optimizer.step()

hooks = {"logits": {"layers": ".", "kind": "forward", "action": "record", "stats": "none", "tensors": True}}
with torch.no_grad(), instrument.attach(teacher, hooks, out="runs/teacher") as probe:
    for ids in torch.arange(1400).split(200):
        probe.batch(ids=ids)
        teacher(images[ids])
        probe.end_step()


def distance(logits, recorded):
    """Return the KL divergence of the softened distributions, times the temperature squared (Hinton et al. 2015, section 2)."""
    targets = (recorded / TEMPERATURE).softmax(1)
    return nn.functional.kl_div((logits / TEMPERATURE).log_softmax(1), targets, reduction="batchmean") * TEMPERATURE**2


data = instrument.load("runs/teacher").dataset(".")
torch.manual_seed(1)
student = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
batches = data.batches(100, shuffle=0)
print(f"before  distance {distance(student(images[data[:]['id']]), data[:]['x']):.4f}")
for epoch in range(30):
    batches.set_epoch(epoch)  # another order
    for batch in batches:
        optimizer.zero_grad()
        distance(student(images[batch["id"]]), batch["x"]).backward()
        optimizer.step()
print(f"after   distance {distance(student(images[data[:]['id']]), data[:]['x']):.4f}")
for name, model in (("teacher", teacher), ("student", student)):
    accuracy = (model(images[1400:]).argmax(1) == digits[1400:]).float().mean()
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name} {size:>6,} parameters  accuracy {accuracy:.1%}")
