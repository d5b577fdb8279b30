"""Time of the host per recorded tensor on the code path of a GPU, relative to that of the CPU.

python benchmarks/device_host.py [--rounds N]

The networks and their tensors are on the CPU, and a function that does almost nothing replaces those of the driver. So the time of a
launch is without the work of the driver, and the path of the CPU also reads the 1,024 elements of a tensor.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from measure import machine
from torch import Tensor, nn

import instrument
from instrument.stats import cpu_kernel

LAYERS, WIDTH, BATCH = 32, 64, 16
TENSORS = 2 * LAYERS  # outputs and gradients
SPECS: dict[str, dict[str, Any]] = {
    "outputs": {"layers": "*", "kind": "forward", "action": "record"},
    "grads": {"layers": "*", "kind": "tensor", "action": "record"},
}


def network() -> nn.Module:
    """Return a network whose layers take little time."""
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def replace_driver() -> None:
    """Let slabs launch a function that clears no floating-point flags and returns 0, for float32 tensors on the CPU."""
    nothing = ctypes.cast(ctypes.CDLL("libm.so.6").feclearexcept, ctypes.c_void_p).value or 0
    cpu_kernel.connect_driver((nothing, nothing, nothing), 4096)
    memory = torch.empty(1024, 8), torch.empty(1)
    cpu_kernel.add_launcher(torch.device("cpu"), torch.float32, 0, 1, 0, (128, 32), memory)


def step_of(model: nn.Module, batch: Tensor) -> Callable[[], None]:
    """Return a function that runs a forward and a backward pass."""

    def step() -> None:
        model(batch).square().mean().backward()

    return step


def register_empty_hooks(model: nn.Module) -> None:
    """Register hooks that register a hook on their output, and do nothing else."""

    def on_output(module: nn.Module, args: Any, output: Tensor) -> None:  # noqa: ARG001
        output.register_hook(lambda gradient: None)

    for layer in model.children():
        layer.register_forward_hook(on_output)


def measure(rounds: int, variants: dict[str, tuple[Callable[[], None], Callable[[], object]]]) -> dict[str, float]:
    """Return the microseconds per tensor of each variant, minus those of the first one.

    Args:
        rounds: The number of steps.
        variants: For each variant a step, and a function that is called after it and not timed. Each round runs
            them in a random order, because the step before determines the content of the caches.
    """
    found: dict[str, list[float]] = {name: [] for name in variants}
    generator = random.Random(0)
    for _ in range(rounds):
        for name, (step, end_step) in generator.sample([*variants.items()], len(variants)):
            start = time.perf_counter()
            step()
            found[name].append(time.perf_counter() - start)
            end_step()
    bare, *_ = found.values()
    return {name: 1e6 / TENSORS * (median(times) - median(bare)) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=1000)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print(machine(), f"\n{LAYERS} x Linear({WIDTH}), outputs and gradients, hooks only: microseconds per tensor\n")
    batch = torch.randn(BATCH, WIDTH)
    bare, empty, on_cpu, on_device = (network() for _ in range(4))
    register_empty_hooks(empty)
    replace_driver()
    with instrument.attach(on_cpu, SPECS) as cpu_probe, instrument.attach(on_device, SPECS) as device_probe:
        device_probe.recorder._stats._max_rows[torch.device("cpu")] = TENSORS  # a GPU gets memory after its first step
        device_probe.end_step()
        found = measure(
            rounds,
            {
                "nothing": (step_of(bare, batch), lambda: None),
                "empty hooks that register empty hooks": (step_of(empty, batch), lambda: None),
                "path of the CPU": (step_of(on_cpu, batch), cpu_probe.end_step),
                "path of a GPU, driver replaced": (step_of(on_device, batch), device_probe.end_step),
            },
        )
    cpu_kernel.disconnect_driver()
    for name, microseconds in found.items():
        print(f"{name}: {microseconds:.2f}")
    print(f"ratio: {found['path of a GPU, driver replaced'] / found['path of the CPU']:.2f}")


if __name__ == "__main__":
    main()
