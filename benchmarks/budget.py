"""Time budgets: the overhead of hooks with and without a budget, relative to uninstrumented steps.

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

WARM_UP_STEPS = 300  # steps before the measurement
MEASUREMENT_SECONDS = 6.0  # approximate duration of a measurement


def narrow(layers: int, width: int, batch: int) -> Workload:
    """Return a workload of many small layers, for which the relative overhead of hooks is high."""

    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), *(nn.Linear(width, width) for _ in range(layers)))

    return Workload(f"{layers} layers of {width}, batch {batch}", model, _images((batch, width), width))


CASES = [
    (WORKLOADS["mnist_cnn"], 0.02), (WORKLOADS["mnist_cnn"], 0.05), (WORKLOADS["mnist_cnn"], 0.1),
    (WORKLOADS["gpt"], 0.02), (WORKLOADS["gpt"], 0.05),
    (WORKLOADS["resnet18"], 0.02), (WORKLOADS["resnet18"], 0.05),
    (narrow(16, 512, 256), 0.05), (narrow(32, 256, 128), 0.1), (narrow(64, 128, 256), 0.2),
]  # fmt: skip


def overheads(workload: Workload, budget: float) -> tuple[float, float, float]:
    """Return the overhead without a budget, the overhead with a budget, and the budget's estimate.

    Two identical trainings differ by some percent, depending on their memory layout. Therefore the instrumented training is
    also measured without its hooks, before and after, and these measurements are the reference.
    """
    baseline, hooked = workload.training(), workload.training()
    specs = _specs(hooked)

    def relative_to_baseline(step: Callable[[], object]) -> float:
        steps = 8  # with a budget, only some of these steps record
        rounds = max(4, round(MEASUREMENT_SECONDS / (2 * steps * _seconds(baseline))))
        return paired(lambda: baseline.step().item(), step, rounds=rounds, steps=steps).ratio

    def with_hooks(out: Path, **settings: object) -> tuple[float, float]:
        with instrument.attach(hooked.model, specs, optimizer=hooked.optimizer, out=out, **settings) as probe:  # type: ignore[arg-type]
            for _ in range(WARM_UP_STEPS if settings else 5):
                probe.end_step(loss=hooked.step())
            ratio = relative_to_baseline(lambda: probe.end_step(loss=hooked.step()))
            return ratio, 0.0 if probe.budget is None else probe.budget.measured or 0.0

    def without_hooks() -> float:
        return relative_to_baseline(lambda: hooked.step().item())

    with tempfile.TemporaryDirectory() as folder:
        references = [without_hooks()]
        unbudgeted, _ = with_hooks(Path(folder) / "unbudgeted")
        references.append(without_hooks())
        budgeted, reported = with_hooks(Path(folder) / "budgeted", budget={"time": budget})
        references.append(without_hooks())
    return unbudgeted / mean(references[:2]) - 1, budgeted / mean(references[1:]) - 1, reported


def _seconds(training: Training) -> float:
    for _ in range(3):
        training.step().item()
    start = time.perf_counter()
    for _ in range(5):
        training.step().item()
    return (time.perf_counter() - start) / 5


def _specs(training: Training) -> dict[str, dict[str, object]]:
    record = {"layers": training.leaves(), "action": "record"}
    return {"outputs": {**record, "kind": "forward"}, "grads": {**record, "kind": "tensor"}}


def main() -> None:
    warnings.simplefilter("ignore")
    keep_memory()
    print(machine())
    print(
        "\n| workload, every leaf's output and gradient | budget | overhead without a budget | final overhead | estimate of the budget |"
    )
    print("|---|---|---|---|---|")
    for workload, budget in CASES:
        unbudgeted, budgeted, reported = overheads(workload, budget)
        print(f"| {workload.name} | {budget:.0%} | {unbudgeted:.1%} | {budgeted:.1%} | {reported:.1%} |", flush=True)


if __name__ == "__main__":
    main()
