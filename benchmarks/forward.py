"""Cost of `mode: forward` with one recorded layer, relative to a bare loop that keeps the same outputs for `np.save`.

python benchmarks/forward.py [--samples 1024] [--batch 64] [--rounds 7]

ResNet-18 in eval mode on random images of 3x64x64; the output of `avgpool` of each batch is recorded with ids. Both loops load
the same batches, alternate in one process, and end with the values on disk. The goal is a ratio of 1.05 without the time of
`np.save`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import machine
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision.models import resnet18

from instrument.config.parse import parse_config
from instrument.probe.probe import Probe
from instrument.storage.parquet import ParquetSink
from instrument.training.experiment import Experiment
from instrument.training.loop import run_forward


def images(split: str, samples: int) -> Dataset[Any]:  # noqa: ARG001
    """Return random images with targets."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.rand(samples, 3, 64, 64, generator=generator), torch.arange(samples) % 1000)


def recorded(samples: int, batch: int) -> Experiment:
    """Return the experiment with one recorded layer."""
    return Experiment(
        parse_config(
            {
                "mode": "forward",
                "model": {"_target_": "torchvision.models.resnet18"},
                "data": {"dataset": {"_target_": f"{__name__}.images", "samples": samples}},
                "task": {"_target_": "instrument.tasks.Supervised", "loss": {"_target_": "torch.nn.CrossEntropyLoss"}},
                "train": {"steps": 1, "batch_size": batch},
                "optimizer": {"_target_": "torch.optim.SGD", "lr": 0.1},
                "hooks": {
                    "f": {"layers": "avgpool", "kind": "forward", "action": "record", "stats": "none", "tensors": True}
                },
            }
        )
    )


def run(samples: int, batch: int, folder: Path) -> float:
    """Run `mode: forward` once. Return its duration in seconds."""
    experiment = recorded(samples, batch)
    folder.mkdir()
    started_at = time.perf_counter()
    with Probe(experiment.plan, ParquetSink(folder)) as probe:
        run_forward(experiment, probe, lambda progress: None)
    return time.perf_counter() - started_at


def loop(model: torch.nn.Module, samples: int, batch: int, file: Path) -> tuple[float, float]:
    """Run the bare loop. Return its duration, and that of `np.save`, in seconds."""
    kept: list[torch.Tensor] = []
    handle = model.avgpool.register_forward_hook(lambda module, args, output: kept.append(output))  # type: ignore[union-attr]
    loader = DataLoader(images("train", samples), batch)
    started_at = time.perf_counter()
    losses, correct = [], []
    with torch.no_grad():
        for inputs, targets in loader:
            output = model(inputs)
            losses.append(torch.nn.functional.cross_entropy(output, targets).item())
            correct.append((output.argmax(1) == targets).sum().item())
    ended_at = time.perf_counter()
    handle.remove()
    np.save(file, torch.cat(kept).numpy())
    return ended_at - started_at, time.perf_counter() - ended_at


def main() -> None:
    """Print the durations and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=1_024)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    print(machine())
    model = resnet18().eval()
    ratios, bare, saved = [], [], []
    for number in range(options.rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            seconds = run(options.samples, options.batch, Path(folder) / "run")
            alone, save = loop(model, options.samples, options.batch, Path(folder) / "X.npy")
        if number:  # the first round is warm-up
            ratios.append((seconds - save) / alone)
            bare.append(alone)
            saved.append(save)
    low, middle, high = statistics.quantiles(ratios, n=4)
    print("\n| bare loop, s | np.save, s | mode: forward without np.save, relative to the bare loop |\n|---|---|---|")
    print(f"| {statistics.median(bare):.2f} | {statistics.median(saved):.3f} | {middle:.3f} ({low:.2f}-{high:.2f}) |")


if __name__ == "__main__":
    main()
