"""Record the runs in this folder, each with another version of PyTorch: `python record.py FOLDER`.

torch-2.13.0 was recorded with ATEN_CPU_CAPABILITY=default, which selects the kernels for processors without vector
instructions, and torch-2.14.1 without it. On one processor, the two versions give the same numbers otherwise. Only
run.json and the tables stats, tensors and metrics are kept.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import instrument

TENSORS = {"action": "record", "stats": "none", "tensors": True}
HOOKS = {
    "activations": {"layers": "**", "exclude": "3.self_attn.out_proj", "kind": "forward", "action": "record"},
    "gradients": {"layers": "**", "kind": "parameter_grad", "action": "record"},
    "kept": {**TENSORS, "layers": ["0", "3", "5"], "kind": "forward", "steps": [0]},
}


def numbers(shape: torch.Size | tuple[int, ...], factor: int) -> Tensor:
    """Return numbers between -0.5 and 0.5 that are equal in all versions."""
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    return (index * factor * 0.6180339887498949 % 1.0 - 0.5).float().reshape(shape)


def main(folder: str) -> None:
    """Train a small network with a convolution and a transformer layer for four steps."""
    transformer = nn.TransformerEncoderLayer(64, 4, 32, dropout=0.0, batch_first=True, norm_first=True)
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.GELU(), nn.Flatten(2), transformer, nn.Flatten(), nn.Linear(256, 10)]
    model = nn.Sequential(*layers, nn.LogSoftmax(-1))
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(numbers(parameter.shape, index + 3) * 2 / parameter.shape[-1] ** 0.5)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with instrument.attach(model, HOOKS, optimizer=optimizer, out=folder) as probe:
        for step in range(4):
            loss = nn.functional.nll_loss(model(numbers((2, 1, 8, 8), 101 + step)), torch.arange(2) + step)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)


if __name__ == "__main__":
    main(sys.argv[1])
