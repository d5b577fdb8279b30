"""Time estimates of `plan=true` compared with measured overhead, for ten configurations.

python benchmarks/forecasts.py
"""

from __future__ import annotations

import tempfile
import warnings
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from measure import keep_memory, machine, paired
from workloads import WORKLOADS

from instrument.config.parse import parse_config
from instrument.probe.probe import Probe
from instrument.storage.parquet import ParquetSink
from instrument.training.dry_run import dry_run
from instrument.training.environment import process_state
from instrument.training.experiment import Experiment
from instrument.training.loop import train_step

STEPS = 100_000  # steps of the planned run
STEPS_PER_ROUND = 10  # the least common multiple of all values of `every`
MEASUREMENT_SECONDS = 12.0  # approximate duration of a measurement


class WorkloadSamples(torch.utils.data.Dataset[Any]):
    """A dataset of a few batches of a workload."""

    def __init__(self, split: str, workload: str) -> None:
        self.batch_size = len(WORKLOADS[workload].batch("cpu")[0])
        batches = [WORKLOADS[workload].batch("cpu") for _ in range(4 if split == "train" else 1)]
        self.inputs, self.targets = (torch.cat(tensors) for tensors in zip(*batches, strict=True))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


def make_model(workload: str) -> torch.nn.Module:
    return WORKLOADS[workload].model()


def make_config(workload: str, hooks: dict[str, Any]) -> dict[str, Any]:
    size = len(WORKLOADS[workload].batch("cpu")[0])
    task = {"_target_": "instrument.tasks.NextToken"} if workload == "gpt" else {
        "_target_": "instrument.tasks.Supervised", "loss": {"_target_": "torch.nn.CrossEntropyLoss"}}  # fmt: skip
    return {
        "model": {"_target_": f"{__name__}.make_model", "workload": workload},
        "data": {"dataset": {"_target_": f"{__name__}.WorkloadSamples", "workload": workload}},
        "task": task,
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 1e-3, "momentum": 0.9},
        "train": {"steps": STEPS, "batch_size": size, "eval_batch_size": size},
        "hooks": hooks,
    }


OUTPUTS = {"layers": "**", "kind": "forward", "action": "record"}
GRADIENTS = {**OUTPUTS, "kind": "tensor"}
PARAMETER_GRADIENTS = {**OUTPUTS, "kind": "parameter_grad"}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("mnist_cnn", "outputs", {"a": OUTPUTS}),
    ("mnist_cnn", "outputs and gradients", {"a": OUTPUTS, "b": GRADIENTS}),
    ("mnist_cnn", "the same every 5 and 10 steps", {"a": {**OUTPUTS, "every": 5}, "b": {**GRADIENTS, "every": 10}}),
    ("mnist_cnn", "quantiles and histograms", {"a": {**OUTPUTS, "quantiles": True, "histogram": True}}),
    ("mnist_cnn", "tensors of 4 samples", {"a": {**OUTPUTS, "stats": "none", "tensors": True, "samples": 4}}),
    ("mnist_cnn", "clipped gradients, noise", {
        "a": {**PARAMETER_GRADIENTS, "action": "clip", "norm": 1.0},
        "b": {**OUTPUTS, "layers": "layers.1", "action": "modify", "fn": "noise", "std": 0.1},
    }),
    ("gpt", "outputs", {"a": OUTPUTS}),
    ("gpt", "outputs, gradients, parameters' gradients", {"a": OUTPUTS, "b": GRADIENTS, "c": PARAMETER_GRADIENTS}),
    ("resnet18", "outputs and gradients", {"a": OUTPUTS, "b": GRADIENTS}),
    ("resnet18", "parameters' gradients and updates", {"a": PARAMETER_GRADIENTS, "b": {**OUTPUTS, "kind": "step_post", "role": "update"}}),
]  # fmt: skip


class UninstrumentedProbe:
    """A stand-in for a probe that records nothing and reads the loss as any training loop does."""

    def loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def begin_micro_step(self, indices: object, batch: object) -> None:
        pass

    def end_micro_step(self) -> None:
        pass

    def end_step(self, *, loss: torch.Tensor, **metrics: object) -> dict[str, float | None]:  # noqa: ARG002
        return {"loss": loss.item()}


def prepare_experiment(workload: str, hooks: dict[str, Any]) -> Experiment:
    return Experiment(parse_config(make_config(workload, hooks)))


def measure_overhead(workload: str, hooks: dict[str, Any]) -> float:
    """Return the relative overhead of hooks, measured over complete periods of their schedules."""
    baseline, hooked = prepare_experiment(workload, {}), prepare_experiment(workload, hooks)
    batches = [group for _, group in zip(range(4), (group for _, group in hooked.batches), strict=False)]
    hooked_batches, baseline_batches = cycle(batches), cycle(batches)
    with (
        tempfile.TemporaryDirectory() as folder,
        Probe(hooked.plan, ParquetSink(Path(folder)), optimizer=hooked.optimizer) as probe,
    ):

        def baseline_step() -> None:
            train_step(baseline, UninstrumentedProbe(), next(baseline_batches))

        ratio = paired(
            baseline_step, lambda: train_step(hooked, probe, next(hooked_batches)), rounds=4, steps=STEPS_PER_ROUND
        )
        rounds = max(4, round(MEASUREMENT_SECONDS / (2 * STEPS_PER_ROUND * ratio.baseline)))
        return (
            paired(
                baseline_step,
                lambda: train_step(hooked, probe, next(hooked_batches)),
                rounds=rounds,
                steps=STEPS_PER_ROUND,
            ).ratio
            - 1
        )


def main() -> None:
    warnings.simplefilter("ignore")
    keep_memory()
    print(machine())
    print("\n| workload | recorded | predicted | measured | predicted / measured |")
    print("|---|---|---|---|---|")
    for workload, recorded, hooks in CASES:
        with process_state(seed=0, deterministic=False):
            predicted = dry_run(prepare_experiment(workload, hooks)).slowdown
            measured = measure_overhead(workload, hooks)
        print(
            f"| {WORKLOADS[workload].name} | {recorded} | {predicted:.1%} | {measured:.1%} | {predicted / measured:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
