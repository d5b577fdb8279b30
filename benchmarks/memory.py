"""Peak memory of training with records, minus that of the same training without records, in MB.

python benchmarks/memory.py [--steps N] [--rounds N] [--only mnist_cnn gpt resnet18]

Each training runs in a process of its own. The peak includes the conversion of a journal to a Parquet part when the run ends.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from measure import keep_memory, machine
from workloads import WORKLOADS, Training

LABELS = {
    "empty": "no hooks",
    "statistics": "statistics of every leaf's output and gradient",
    "tensors": "the same, and the tensors of the outputs",
    "operators": "every operator (`record_operators`)",
}


def specs_of(records: str, training: Training) -> dict[str, dict[str, Any]]:
    """Return the hook specs of a row of the table."""
    if records in ("empty", "operators"):
        return {}
    record = {"layers": training.leaves(), "action": "record"}
    output = {**record, "kind": "forward", "tensors": records == "tensors"}
    return {"outputs": output, "gradients": {**record, "kind": "tensor"}}


def train(name: str, records: str, steps: int) -> float:
    """Train in this process, and return its peak memory in MB."""
    import instrument

    keep_memory()
    training = WORKLOADS[name].training()
    specs = specs_of(records, training)
    with tempfile.TemporaryDirectory() as folder:
        if records == "bare":
            for _ in range(steps):
                training.step().item()
        else:
            out = Path(folder) / "run"
            with instrument.attach(training.model, specs, optimizer=training.optimizer, out=out) as probe:
                for _ in range(steps):
                    with probe.record_operators() if records == "operators" else nullcontext():
                        loss = training.step()
                    probe.end_step(loss=loss)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def peak(name: str, records: str, steps: int) -> float:
    """Return the peak memory of a training in a new process, in MB."""
    command = [sys.executable, "-W", "ignore", __file__, "--train", name, records, "--steps", str(steps)]
    return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", nargs="*", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--train", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        print(train(*options.train, options.steps))
        return
    print(machine())
    print("\n| recorded | " + " | ".join(WORKLOADS[name].name for name in options.only) + " |")
    print("|---|" + "---|" * len(options.only))
    bare = {
        name: statistics.median(peak(name, "bare", options.steps) for _ in range(options.rounds))
        for name in options.only
    }
    print(
        "| training without hooks, MB | " + " | ".join(f"{bare[name]:.0f}" for name in options.only) + " |", flush=True
    )
    for records, label in LABELS.items():
        peaks = [
            statistics.median(peak(name, records, options.steps) for _ in range(options.rounds))
            for name in options.only
        ]
        cells = [f"+{found - bare[name]:.0f}" for name, found in zip(options.only, peaks, strict=True)]
        print(f"| {label} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
