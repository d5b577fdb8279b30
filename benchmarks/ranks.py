"""Step time with rows of each process and with merged rows, in distributed training. The script starts torchrun itself.

    python benchmarks/ranks.py [--processes 2]

Each variant has a separate copy of the model in `DistributedDataParallel`. The variants alternate every few steps. Each process
uses one thread.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from measure import machine
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from workloads import MnistCNN

import instrument

ROUNDS, STEPS, WARM_UP_ROUNDS = 24, 5, 2
OUTPUTS = {"layers": "**", "kind": "forward", "action": "record"}
GRADIENTS = {"layers": "**", "kind": "tensor", "action": "record"}
HOOK_SETS: dict[str, dict[str, Any]] = {
    "statistics": {"outputs": OUTPUTS, "gradients": GRADIENTS},
    "statistics and quantiles": {"outputs": {**OUTPUTS, "quantiles": [0.25, 0.5, 0.75]}, "gradients": GRADIENTS},
}


def small_network() -> tuple[nn.Module, Tensor]:
    """Return a small, deep network and a batch; communication dominates its overhead."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(16))), torch.randn(32, 64)


def mnist_network() -> tuple[nn.Module, Tensor]:
    """Return the MNIST network and a batch of 32 per process."""
    torch.manual_seed(0)
    return MnistCNN(), torch.randn(32, 1, 28, 28)


def make_variant(make: Callable[[], tuple[nn.Module, Tensor]], hooks: dict[str, Any], folder: Path, reduce: str) -> Any:
    """Return the exit stack of a variant, a function that makes one step, and the probe (None without hooks)."""
    network, batch = make()
    model = DistributedDataParallel(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    stack = ExitStack()
    probe = None
    if hooks:
        context = instrument.attach(model, hooks, optimizer=optimizer, out=folder, reduce=reduce)  # type: ignore[arg-type]
        probe = stack.enter_context(context)

    def step() -> None:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if probe is not None:
            probe.end_step(loss=loss)

    return stack, step, probe


def seconds_per_step(step: Callable[[], None]) -> float:
    """Return the seconds per step of the slowest process."""
    dist.barrier()
    start = time.perf_counter()
    for _ in range(STEPS):
        step()
    seconds = torch.tensor((time.perf_counter() - start) / STEPS, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


def measure(name: str, make: Callable[[], tuple[nn.Module, Tensor]], folder: Path) -> None:
    """Print the table rows of one network."""
    for label, hooks in HOOK_SETS.items():
        variants = {
            reduce: make_variant(
                make, hooks if reduce else {}, folder / f"{name}-{label}-{reduce}".replace(" ", "_"), reduce
            )
            for reduce in ("", "none", "global")
        }
        times: dict[str, list[float]] = {reduce: [] for reduce in variants}
        for number in range(ROUNDS + WARM_UP_ROUNDS):
            order = list(variants) if number % 2 else list(variants)[::-1]
            for reduce in order:
                seconds = seconds_per_step(variants[reduce][1])
                if number >= WARM_UP_ROUNDS:
                    times[reduce].append(seconds)
        probe = variants["global"][2]
        tensors = sum(attached.fired for attached in probe.attached_hooks) / probe.step
        bytes_per_tensor = probe.ranks.bytes_sent / probe.step / tensors
        for stack, *_ in variants.values():
            stack.close()
        ratios = [[b / a for a, b in zip(times[""], times[reduce], strict=True)] for reduce in ("none", "global")]
        cells = " | ".join(
            f"{statistics.median(ratio):.2f} ({statistics.quantiles(ratio, n=4)[0]:.2f}-{statistics.quantiles(ratio, n=4)[2]:.2f})"
            for ratio in ratios
        )
        if dist.get_rank() == 0:
            baseline = 1e3 * statistics.median(times[""])
            merging = 1e3 * statistics.median(b - a for a, b in zip(times["none"], times["global"], strict=True))
            print(
                f"| {name}, {label} | {tensors:.0f} | {baseline:.1f} | {cells} | {merging:.1f} | {bytes_per_tensor:.0f} |",
                flush=True,
            )


def run_worker() -> None:
    """Run the benchmark in one of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print(f"{machine()}; {dist.get_world_size()} processes, gloo\n")
        print(
            "| network | tensors per step | baseline, ms | rows of each rank | merged rows | merging, ms | bytes sent per tensor |"
        )
        print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as local_folder:
        shared_folder: list[str | None] = [local_folder]
        dist.broadcast_object_list(shared_folder)
        assert shared_folder[0] is not None
        for name, make in {"16 layers of 64": small_network, "MNIST CNN": mnist_network}.items():
            measure(name, make, Path(shared_folder[0]))
        dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--processes", type=int, default=2)
    processes = parser.parse_args().processes
    command = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", __file__]
    subprocess.run(
        [sys.executable, "-W", "ignore", "-m", *command], env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True
    )


if __name__ == "__main__":
    run_worker() if "RANK" in os.environ else main()
