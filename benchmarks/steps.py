"""Step time with hooks that write statistics to Parquet, relative to the same step without hooks.

python benchmarks/steps.py [--rounds N] [--only mnist_cnn gpt resnet18] [--compiled]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from measure import Ratio, keep_memory, machine, paired
from workloads import WORKLOADS, Training, Workload

import instrument
from instrument.config.spec_file import hook_sets
from instrument.plan.modules import Layers
from instrument.plan.structure import find_structure

NEVER = {"start": 10**9}


def jobs(training: Training) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the hook specs of each row of the table, by the label of the row."""
    leaves = training.leaves()
    record = {"action": "record"}
    output = {"layers": leaves, "kind": "forward", **record}
    gradient = {"layers": leaves, "kind": "tensor", **record}
    parameters = {
        "weights": {"layers": "**", "kind": "step_post", "role": "param", **record},
        "gradients": {"layers": "**", "kind": "parameter_grad", **record},
        "updates": {"layers": "**", "kind": "step_post", "role": "update", **record},
    }
    rows = {
        "hooks attached, none scheduled": {"outputs": {**output, **NEVER}, "grads": {**gradient, **NEVER}},
        "every leaf's output and gradient, every 10 steps": {
            "outputs": {**output, "every": 10},
            "grads": {**gradient, "every": 10},
        },
        "every leaf's output, every step": {"outputs": output},
        "every leaf's output and gradient, every step": {"outputs": output, "grads": gradient},
        "the same, and every parameter, its gradient and its update": {
            "outputs": output,
            "grads": gradient,
            **parameters,
        },
    }
    if find_structure(Layers.of(training.model), ["attention"])["attention"]:
        health = yaml.safe_load(hook_sets()["transformer"].read_text())
        rows |= {
            "hooks=transformer, every 10 steps": health,
            "hooks=transformer, every step": {name: {**spec, "every": 1} for name, spec in health.items()},
        }
    return rows


LOWER_BOUND = "lower bound for the fourth row: one read of each tensor"


def measure_lower_bound(workload: Workload, rounds: int) -> Ratio:
    """Measure a step whose hooks only compute the sum of every leaf's output and gradient."""
    baseline, hooked = workload.training(), workload.training()

    def read_output(module: torch.nn.Module, args: Any, output: torch.Tensor) -> None:  # noqa: ARG001
        output.detach().sum()
        if output.requires_grad:
            output.register_hook(lambda gradient: (gradient.sum(), None)[1])

    for name in hooked.leaves():
        hooked.model.get_submodule(name).register_forward_hook(read_output)
    return paired(baseline.step, hooked.step, rounds=rounds)


def measure(workload: Workload, specs: dict[str, dict[str, Any]], rounds: int, *, compiled: bool) -> Ratio:
    """Measure a step with hooks relative to a step without hooks. Both are compiled, if requested."""
    baseline, hooked = workload.training(), workload.training()
    for training in (baseline, hooked) if compiled else ():
        training.model.compile(fullgraph=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        instrument.attach(hooked.model, specs, optimizer=hooked.optimizer, out=Path(folder) / "run") as probe,
    ):

        def step() -> None:
            probe.end_step(loss=hooked.step())

        def baseline_step() -> None:
            baseline.step().item()

        every = 10 if any(spec.get("every") == 10 for spec in specs.values()) else 1
        return paired(baseline_step, step, rounds=max(4, rounds // every), steps=every)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--compiled", action="store_true", help="compile the models with torch.compile")
    options = parser.parse_args()
    workloads = {name: workload for name, workload in WORKLOADS.items() if not options.only or name in options.only}
    keep_memory()
    print(machine())
    columns: dict[str, dict[str, Ratio]] = {}
    for workload in workloads.values():
        column = columns[workload.name] = {}
        for name, specs in jobs(workload.training()).items():
            column[name] = measure(workload, specs, options.rounds, compiled=options.compiled)
            print(
                f"{workload.name}: {name}: {column[name]}  (baseline {column[name].baseline * 1e3:.1f} ms)", flush=True
            )
        column[LOWER_BOUND] = measure_lower_bound(workload, options.rounds)
        print(f"{workload.name}: {LOWER_BOUND}: {column[LOWER_BOUND]}", flush=True)
    print("\n| recorded | " + " | ".join(columns) + " |")
    print("|---|" + "---|" * len(columns))
    for name in dict.fromkeys(name for column in columns.values() for name in column):
        ratios = (f"{column[name].ratio:.2f}" if name in column else "" for column in columns.values())
        print(f"| {name} | " + " | ".join(ratios) + " |")


if __name__ == "__main__":
    main()
