"""What `plan=true` says of time, held against what steps really take, for ten configurations.

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

from instrument.capture.probe import Probe
from instrument.dry_run.dry_run import dry_run
from instrument.sinks.parquet import ParquetSink
from instrument.spec.parse import parse_config
from instrument.training.device import process_state
from instrument.training.experiment import Experiment, prepare
from instrument.training.loop import make_step

STEPS = 100_000  # of the run that is planned
MEASURED = 10  # steps in a half of a round: the least common multiple of every `every`
SECONDS = 12.0  # of a measurement, about


class Pairs(torch.utils.data.Dataset[Any]):
    """A few batches of a workload, again and again."""

    def __init__(self, split: str, workload: str) -> None:
        self.batch_size = len(WORKLOADS[workload].batch("cpu")[0])
        parts = [WORKLOADS[workload].batch("cpu") for _ in range(4 if split == "train" else 1)]
        self.inputs, self.targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.inputs[index], self.targets[index]


def model_of(workload: str) -> torch.nn.Module:
    return WORKLOADS[workload].model()


def config_of(workload: str, hooks: dict[str, Any]) -> dict[str, Any]:
    size = len(WORKLOADS[workload].batch("cpu")[0])
    task = {"_target_": "instrument.tasks.NextToken"} if workload == "gpt" else {
        "_target_": "instrument.tasks.Supervised", "loss": {"_target_": "torch.nn.CrossEntropyLoss"}}  # fmt: skip
    return {
        "model": {"_target_": f"{__name__}.model_of", "workload": workload},
        "data": {"dataset": {"_target_": f"{__name__}.Pairs", "workload": workload}},
        "task": task,
        "optimizer": {"_target_": "torch.optim.SGD", "lr": 1e-3, "momentum": 0.9},
        "train": {"steps": STEPS, "batch_size": size, "eval_batch_size": size},
        "hooks": hooks,
    }


LOOK = {"layers": "**", "kind": "forward", "action": "record"}
GRADS = {**LOOK, "kind": "tensor"}
WEIGHTS = {**LOOK, "kind": "parameter_grad"}
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("mnist_cnn", "outputs", {"a": LOOK}),
    ("mnist_cnn", "outputs and gradients", {"a": LOOK, "b": GRADS}),
    ("mnist_cnn", "the same every 5 and 10 steps", {"a": {**LOOK, "every": 5}, "b": {**GRADS, "every": 10}}),
    ("mnist_cnn", "quantiles and histograms", {"a": {**LOOK, "quantiles": True, "histogram": True}}),
    ("mnist_cnn", "tensors of 4 samples", {"a": {**LOOK, "stats": "none", "tensors": True, "samples": 4}}),
    ("mnist_cnn", "clipped gradients, noise", {
        "a": {**WEIGHTS, "action": "clip", "norm": 1.0}, "b": {**LOOK, "layers": "layers.1", "action": "modify", "fn": "noise", "std": 0.1},
    }),
    ("gpt", "outputs", {"a": LOOK}),
    ("gpt", "outputs, gradients, parameters' gradients", {"a": LOOK, "b": GRADS, "c": WEIGHTS}),
    ("resnet18", "outputs and gradients", {"a": LOOK, "b": GRADS}),
    ("resnet18", "parameters' gradients and updates", {"a": WEIGHTS, "b": {**LOOK, "kind": "step_post", "role": "update"}}),
]  # fmt: skip


class Bare:
    """Watches nothing, and reads the loss as any loop does."""

    def loss(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def end_micro_step(self) -> None:
        pass

    def end_step(self, *, loss: torch.Tensor, **metrics: object) -> dict[str, float | None]:  # noqa: ARG002
        return {"loss": loss.item()}


def made(workload: str, hooks: dict[str, Any]) -> Experiment:
    return prepare(parse_config(config_of(workload, hooks)))


def measured(workload: str, hooks: dict[str, Any]) -> float:
    """By how much a step is really longer, over steps of the whole period of the schedules."""
    bare, hooked = made(workload, {}), made(workload, hooks)
    batches = [group for _, group in zip(range(4), (group for _, group in hooked.batches), strict=False)]
    shown, others = cycle(batches), cycle(batches)
    with (
        tempfile.TemporaryDirectory() as folder,
        Probe(hooked.plan, ParquetSink(Path(folder)), optimizer=hooked.optimizer) as probe,
    ):

        def bare_step() -> None:
            make_step(bare, Bare(), next(others))

        ratio = paired(bare_step, lambda: make_step(hooked, probe, next(shown)), rounds=4, steps=MEASURED)
        rounds = max(4, round(SECONDS / (2 * MEASURED * ratio.bare)))
        return paired(bare_step, lambda: make_step(hooked, probe, next(shown)), rounds=rounds, steps=MEASURED).ratio - 1


def main() -> None:
    warnings.simplefilter("ignore")
    keep_memory()
    print(machine())
    print("\n| workload | what is recorded | predicted | measured | predicted / measured |")
    print("|---|---|---|---|---|")
    for workload, what, hooks in CASES:
        with process_state(seed=0, deterministic=False):
            predicted = dry_run(made(workload, hooks)).slowdown
            found = measured(workload, hooks)
        print(
            f"| {WORKLOADS[workload].name} | {what} | {predicted:.1%} | {found:.1%} | {predicted / found:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
