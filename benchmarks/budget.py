"""Whether a budget of time is kept: what hooks cost a step in the end, measured against steps without them.

python benchmarks/budget.py
"""

from __future__ import annotations

import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import mean

from measure import keep_memory, machine, paired
from torch import nn
from workloads import WORKLOADS, Training, Workload, _images

import instrument

SETTLING = 300  # steps before it is measured
MEASURING = 6.0  # seconds of a measurement, about


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
    """The share at first and in the end, and what the probe says of the end.

    Two trainings of one kind differ by some percent, by where their memory lies. So the one with hooks is measured against
    the other both with its hooks and without them, before and after.
    """
    bare, hooked = workload.training(), workload.training()
    specs = _specs(hooked)

    def against_bare(step: Callable[[], object]) -> float:
        steps = 8  # of which some look, and some do not
        rounds = max(4, round(MEASURING / (2 * steps * _seconds(bare))))
        return paired(lambda: bare.step().item(), step, rounds=rounds, steps=steps).ratio

    def looking(out: Path, **settings: object) -> tuple[float, float]:
        with instrument.attach(hooked.model, specs, optimizer=hooked.optimizer, out=out, **settings) as probe:  # type: ignore[arg-type]
            for _ in range(SETTLING if settings else 5):
                probe.end_step(loss=hooked.step())
            ratio = against_bare(lambda: probe.end_step(loss=hooked.step()))
            return ratio, 0.0 if probe.budget is None else probe.budget.measured or 0.0

    def without_hooks() -> float:
        return against_bare(lambda: hooked.step().item())

    with tempfile.TemporaryDirectory() as folder:
        alone = [without_hooks()]
        first, _ = looking(Path(folder) / "free")
        alone.append(without_hooks())
        last, told = looking(Path(folder) / "kept", budget={"time": budget})
        alone.append(without_hooks())
    return first / mean(alone[:2]) - 1, last / mean(alone[1:]) - 1, told


def _seconds(training: Training) -> float:
    for _ in range(3):
        training.step().item()
    began = time.perf_counter()
    for _ in range(5):
        training.step().item()
    return (time.perf_counter() - began) / 5


def _specs(training: Training) -> dict[str, dict[str, object]]:
    record = {"layers": training.leaves(), "action": "record"}
    return {"outputs": {**record, "kind": "forward"}, "grads": {**record, "kind": "tensor"}}


def main() -> None:
    warnings.simplefilter("ignore")
    keep_memory()
    print(machine())
    print("\n| workload, every leaf's output and gradient | budget | without one | in the end | as the run says |")
    print("|---|---|---|---|---|")
    for workload, budget in CASES:
        first, last, told = ends_at(workload, budget)
        print(f"| {workload.name} | {budget:.0%} | {first:.1%} | {last:.1%} | {told:.1%} |", flush=True)


if __name__ == "__main__":
    main()
