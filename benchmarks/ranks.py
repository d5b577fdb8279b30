"""What rows of several processes cost a step, each process's own and merged ones; started by itself with torchrun.

    python benchmarks/ranks.py [--processes 2]

Each way has its own copy of the model in `DistributedDataParallel`, and the ways take turns, a few steps at a time. One thread a
process.
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

ROUNDS, STEPS, WARM = 24, 5, 2
OUTPUTS = {"layers": "**", "kind": "forward", "action": "record"}
GRADIENTS = {"layers": "**", "kind": "tensor", "action": "record"}
WAYS: dict[str, dict[str, Any]] = {
    "statistics": {"outputs": OUTPUTS, "gradients": GRADIENTS},
    "and quantiles": {"outputs": {**OUTPUTS, "quantiles": [0.25, 0.5, 0.75]}, "gradients": GRADIENTS},
}


def deep() -> tuple[nn.Module, Tensor]:
    """Small and deep: what is sent counts, not what is measured."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(16))), torch.randn(32, 64)


def convolutional() -> tuple[nn.Module, Tensor]:
    """The MNIST network at batch 32 a process."""
    torch.manual_seed(0)
    return MnistCNN(), torch.randn(32, 1, 28, 28)


def stepper(make: Callable[[], tuple[nn.Module, Tensor]], hooks: dict[str, Any], folder: Path, reduce: str) -> Any:
    """A context with a function that makes one step, and the probe; without hooks a bare one."""
    net, batch = make()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    stack = ExitStack()
    probe = None
    if hooks:
        attached = instrument.attach(model, hooks, optimizer=optimizer, out=folder, reduce=reduce)  # type: ignore[arg-type]
        probe = stack.enter_context(attached)

    def step() -> None:
        loss = model(batch).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if probe is not None:
            probe.end_step(loss=loss)

    return stack, step, probe


def timed(step: Callable[[], None]) -> float:
    """Seconds a step, of the slowest process."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(STEPS):
        step()
    spent = torch.tensor((time.perf_counter() - began) / STEPS, dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return spent.item()


def measure(name: str, make: Callable[[], tuple[nn.Module, Tensor]], place: Path) -> None:
    """The lines of one network."""
    for way, hooks in WAYS.items():
        ways = {
            reduce: stepper(make, hooks if reduce else {}, place / f"{name}-{way}-{reduce}".replace(" ", "_"), reduce)
            for reduce in ("", "none", "global")
        }
        times: dict[str, list[float]] = {reduce: [] for reduce in ways}
        for number in range(ROUNDS + WARM):
            order = list(ways) if number % 2 else list(ways)[::-1]
            for reduce in order:
                spent = timed(ways[reduce][1])
                if number >= WARM:
                    times[reduce].append(spent)
        probe = ways["global"][2]
        tensors = sum(attached.fired for attached in probe.attached_hooks) / probe.step
        sent = probe.ranks.bytes_sent / probe.step / tensors
        for stack, *_ in ways.values():
            stack.close()
        ratios = [[b / a for a, b in zip(times[""], times[reduce], strict=True)] for reduce in ("none", "global")]
        cells = " | ".join(
            f"{statistics.median(some):.2f} ({statistics.quantiles(some, n=4)[0]:.2f}-{statistics.quantiles(some, n=4)[2]:.2f})"
            for some in ratios
        )
        if dist.get_rank() == 0:
            bare = 1e3 * statistics.median(times[""])
            more = 1e3 * statistics.median(b - a for a, b in zip(times["none"], times["global"], strict=True))
            print(f"| {name}, {way} | {tensors:.0f} | {bare:.1f} | {cells} | {more:.1f} | {sent:.0f} |", flush=True)


def work() -> None:
    """One of the processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print(f"{machine()}; {dist.get_world_size()} processes, gloo\n")
        print(
            "| network | tensors a step | bare, ms | each rank's rows | merged rows | merging, ms | bytes sent a tensor |"
        )
        print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as own:
        place: list[str | None] = [own]
        dist.broadcast_object_list(place)
        assert place[0] is not None
        for name, make in {"16 layers of 64": deep, "MNIST CNN": convolutional}.items():
            measure(name, make, Path(place[0]))
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
    work() if "RANK" in os.environ else main()
