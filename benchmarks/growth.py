"""What becomes of the cost when a run grows: layers x2, x4, x8, steps x10, tensors x10.

    python benchmarks/growth.py

What hooks cost a step is what a step with hooks takes longer than one without; it should grow with what is recorded, and
with nothing else: not with the steps that were made before.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import machine
from torch import nn

import instrument

WIDTH, BATCH, LAYERS, STEPS = 64, 32, 16, 200
RECORD = {"layers": "*", "action": "record"}


def cost(layers: int, steps: int, extra: dict[str, Any], rounds: int = 3) -> tuple[float, float, float]:
    """Milliseconds that hooks cost a step: the median, that of the first tenth, and that of the last; over some rounds."""
    found = []
    for _ in range(rounds):
        torch.manual_seed(0)
        models = [nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))) for _ in range(2)]
        batch = torch.randn(BATCH, WIDTH)
        specs = {"out": {**RECORD, "kind": "forward", **extra}, "grad": {**RECORD, "kind": "tensor", **extra}}
        more = []
        with (
            tempfile.TemporaryDirectory() as folder,
            instrument.attach(models[1], specs, out=Path(folder) / "r") as probe,
        ):
            for _ in range(steps):
                times = []
                for model in models:
                    began = time.perf_counter()
                    loss = model(batch).square().mean()
                    loss.backward()
                    if model is models[1]:
                        probe.end_step(loss=loss)
                    else:
                        loss.item()
                    times.append(time.perf_counter() - began)
                more.append((times[1] - times[0]) * 1e3)
        tenth = max(1, steps // 10)
        found.append([statistics.median(part) for part in (more, more[:tenth], more[-tenth:])])
    whole, first, last = (statistics.median(column) for column in zip(*found, strict=True))
    return whole, first, last


def main() -> None:
    print(machine())
    print(f"{LAYERS} layers of {WIDTH} x {WIDTH}, batch {BATCH}, outputs and gradients of all, {STEPS} steps\n")
    cases: dict[str, tuple[int, int, dict[str, Any]]] = {
        "as it is": (LAYERS, STEPS, {}),
        "layers x2": (2 * LAYERS, STEPS, {}),
        "layers x4": (4 * LAYERS, STEPS, {}),
        "layers x8": (8 * LAYERS, STEPS, {}),
        "steps x10": (LAYERS, 10 * STEPS, {}),
        "tensors of one sample each": (LAYERS, STEPS, {"tensors": True, "samples": 1}),
        "tensors x10 (ten samples)": (LAYERS, STEPS, {"tensors": True, "samples": 10}),
    }
    print("| case | ms a step | of that as it is | first tenth of the steps | last tenth |")
    print("|---|---|---|---|---|")
    base = None
    for name, (layers, steps, extra) in cases.items():
        whole, first, last = cost(layers, steps, extra)
        base = base or whole
        print(f"| {name} | {whole:.2f} | {whole / base:.2f} | {first:.2f} | {last:.2f} |", flush=True)


if __name__ == "__main__":
    main()
