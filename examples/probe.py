# python probe.py
"""Linear probes: a network learns whether a digit is odd. How well does a linear classifier of each layer find the digit itself?"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import instrument

images, digits = (torch.tensor(array) for array in load_digits(return_X_y=True))
images = images.float() / 16

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(200):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(images[:1400]), digits[:1400] % 2).backward()
    optimizer.step()

layers = ["0", "1", "2", "3", "4"]
record = {"layers": layers, "kind": "forward", "action": "record", "stats": "none", "tensors": True}
for split, ids in (("train", torch.arange(1400)), ("test", torch.arange(1400, len(images)))):
    with torch.no_grad(), instrument.attach(model, {"outputs": record}, out=f"runs/probe/{split}") as probe:
        for batch in ids.split(200):
            probe.batch(ids=batch, targets=digits[batch])
            model(images[batch])
            probe.end_step()

train, test = (instrument.load(f"runs/probe/{split}") for split in ("train", "test"))
for layer in layers:
    data, held_out = (run.dataset(layer, with_targets=True) for run in (train, test))
    torch.manual_seed(0)
    classifier = nn.Linear(len(data[0]["x"]), 10)
    optimizer = torch.optim.Adam(classifier.parameters(), lr=0.1)
    batches = data.batches(200, shuffle=0)
    for epoch in range(30):
        batches.set_epoch(epoch)  # another order
        for batch in batches:
            optimizer.zero_grad()
            nn.functional.cross_entropy(classifier(batch["x"]), batch["target"]).backward()
            optimizer.step()
    batch = held_out[:]
    accuracy = (classifier(batch["x"]).argmax(1) == batch["target"]).float().mean()
    print(f"layer {layer} {type(model[int(layer)]).__name__:<6} {len(data[0]['x']):>2} units  digit {accuracy:.1%}")
