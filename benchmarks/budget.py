"""Whether a budget of time is kept: what hooks cost a step in the end, measured against steps without them.

python benchmarks/budget.py
"""

from __future__ import annotations

import tempfile
import time
import warnings
from pathlib import Path

from measure import machine, paired
from torch import nn
from workloads import WORKLOADS, Training, Workload, _images

import instrument

SETTLING = 12.0  # seconds of training before it is measured


def narrow(layers: int, width: int, batch: int) -> Workload:
    """Many small layers, whose hooks cost much for what they compute."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), *(nn.Linear(width, width) for _ in range(layers)))

    return Workload(f"{layers} layers of {width}, batch {batch}", model, _images((batch, width), width))


CASES = [
    (WORKLOADS["mnist_cnn"], 0.02), (WORKLOADS["mnist_cnn"], 0.05), (WORKLOADS["mnist_cnn"], 0.1),
    (WORKLOADS["gpt"], 0.02), (WORKLOADS["gpt"], 0.05),
    (WORKLOADS["resnet18"], 0.02), (WORKLOADS["resnet18"], 0.05),
    (narrow(16, 512, 256), 0.05), (narrow(32, 256, 128), 0.1), (narrow(64, 128, 256), 0.2),
]  # fmt: skip


def ends_at(workload: Workload, budget: float) -> tuple[float, float, float]:
    """The share at first and in the end, both measured against bare steps, and what the probe says of the end."""
    bare, hooked = workload.training(), workload.training()
    specs = _specs(hooked)
    with (
        tempfile.TemporaryDirectory() as folder,
        instrument.attach(hooked.model, specs, optimizer=hooked.optimizer, out=Path(folder) / "free") as probe,
    ):
        first = paired(lambda: bare.step().item(), lambda: probe.end_step(loss=hooked.step()), rounds=10).ratio - 1
    with (
        tempfile.TemporaryDirectory() as folder,
        instrument.attach(
            hooked.model, specs, optimizer=hooked.optimizer, out=Path(folder) / "kept", budget={"time": budget}
        ) as probe,
    ):
        began = time.perf_counter()
        while time.perf_counter() - began < SETTLING:
            probe.end_step(loss=hooked.step())
        steps = 16  # of which some look, and some do not
        last = paired(
            lambda: bare.step().item(), lambda: probe.end_step(loss=hooked.step()), rounds=8, steps=steps
        ).ratio
        assert probe.budget is not None
        told = probe.budget.measured or 0.0
    return first, last - 1, told


def _specs(training: Training) -> dict[str, dict[str, object]]:
    record = {"layers": training.leaves(), "action": "record"}
    return {"outputs": {**record, "kind": "forward"}, "grads": {**record, "kind": "tensor"}}


def main() -> None:
    warnings.simplefilter("ignore")
    print(machine())
    print("\n| workload, every leaf's output and gradient | budget | without one | in the end | as the run says |")
    print("|---|---|---|---|---|")
    for workload, budget in CASES:
        first, last, told = ends_at(workload, budget)
        print(f"| {workload.name} | {budget:.0%} | {first:.1%} | {last:.1%} | {told:.1%} |", flush=True)


if __name__ == "__main__":
    main()
