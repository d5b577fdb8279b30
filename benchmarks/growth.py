"""Growth of the overhead with the size of a run: layers x2, x4, x8, steps x10, tensors x10.

    python benchmarks/growth.py

The overhead is the duration of a step with hooks minus the duration of the same step without hooks. It should grow only with
the recorded data, and not with the number of previous steps.
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


def overhead(layers: int, steps: int, extra: dict[str, Any], rounds: int = 3) -> tuple[float, float, float]:
    """Measure the overhead of hooks per step in milliseconds.

    Returns:
        The medians over all steps, over the first tenth, and over the last tenth; each the median of all rounds.
    """
    medians = []
    for _ in range(rounds):
        torch.manual_seed(0)
        models = [nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers))) for _ in range(2)]
        batch = torch.randn(BATCH, WIDTH)
        specs = {"out": {**RECORD, "kind": "forward", **extra}, "grad": {**RECORD, "kind": "tensor", **extra}}
        overheads = []
        with (
            tempfile.TemporaryDirectory() as folder,
            instrument.attach(models[1], specs, out=Path(folder) / "r") as probe,
        ):
            for _ in range(steps):
                times = []
                for model in models:
                    start = time.perf_counter()
                    loss = model(batch).square().mean()
                    loss.backward()
                    if model is models[1]:
                        probe.end_step(loss=loss)
                    else:
                        loss.item()
                    times.append(time.perf_counter() - start)
                overheads.append((times[1] - times[0]) * 1e3)
        tenth = max(1, steps // 10)
        medians.append([statistics.median(part) for part in (overheads, overheads[:tenth], overheads[-tenth:])])
    overall, first, last = (statistics.median(column) for column in zip(*medians, strict=True))
    return overall, first, last


def main() -> None:
    print(machine())
    print(f"{LAYERS} layers of {WIDTH} x {WIDTH}, batch {BATCH}, outputs and gradients of all, {STEPS} steps\n")
    cases: dict[str, tuple[int, int, dict[str, Any]]] = {
        "base case": (LAYERS, STEPS, {}),
        "layers x2": (2 * LAYERS, STEPS, {}),
        "layers x4": (4 * LAYERS, STEPS, {}),
        "layers x8": (8 * LAYERS, STEPS, {}),
        "steps x10": (LAYERS, 10 * STEPS, {}),
        "tensors of one sample each": (LAYERS, STEPS, {"tensors": True, "samples": 1}),
        "tensors x10 (ten samples)": (LAYERS, STEPS, {"tensors": True, "samples": 10}),
    }
    print("| case | ms per step | relative to the base case | first tenth of the steps | last tenth |")
    print("|---|---|---|---|---|")
    base = None
    for name, (layers, steps, extra) in cases.items():
        overall, first, last = overhead(layers, steps, extra)
        base = base or overall
        print(f"| {name} | {overall:.2f} | {overall / base:.2f} | {first:.2f} | {last:.2f} |", flush=True)


if __name__ == "__main__":
    main()
