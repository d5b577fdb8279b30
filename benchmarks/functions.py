"""Cost of hooks on torch functions, in microseconds.

python benchmarks/functions.py [--rounds N] [--steps N]

The network is a chain of 32 modules. Each calls `relu` up to 100 times on a tensor [32, 64]. The forward pass runs without
gradients. Bare passes and passes with hooks alternate in one process. A figure is the median of the differences of all rounds,
divided by the number of module calls or function calls in a pass.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from firing import extra_microseconds
from measure import keep_memory, machine
from torch import Tensor, nn

import instrument

MODULES, CALLS = 32, 100
FUNCTION: dict[str, Any] = {"layers": "*", "kind": "function", "functions": "relu", "action": "record"}


class Functions(nn.Module):
    """Calls `relu` several times."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.calls):
            x = torch.relu(x)
        return x


def variants() -> list[tuple[str, int, int, dict[str, Any]]]:
    """Return the label, the function calls per module, the number that divides the time, and the hook of each row."""
    unmatched = {**FUNCTION, "functions": "softmax"}
    scale = {**FUNCTION, "action": "scale", "factor": 0.9}
    return [
        ("idle hook, per module call", 1, MODULES, {**FUNCTION, "start": 10**9}),
        ("scheduled hook, per module call, without functions", 0, MODULES, unmatched),
        ("function that no hook selects, per call", CALLS, MODULES * CALLS, unmatched),
        ("recorded function, per call", CALLS, MODULES * CALLS, FUNCTION),
        ("recorded function, own: true, per call", CALLS, MODULES * CALLS, {**FUNCTION, "own": True}),
        ("scaled function, per call", CALLS, MODULES * CALLS, scale),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    keep_memory()
    torch.set_num_threads(1)
    print(machine())
    print("\n| hooks on torch functions | microseconds |\n|---|---|")
    batch = torch.randn(32, 64)
    for label, calls, count, spec in variants():
        bare, hooked = (nn.Sequential(*(Functions(calls) for _ in range(MODULES))) for _ in range(2))
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            probe = stack.enter_context(instrument.attach(hooked, {"h": spec}))
            empty = stack.enter_context(instrument.attach(bare, {"h": {**FUNCTION, "layers": ".", "start": 10**9}}))
            extra, _ = extra_microseconds(
                step(bare, batch, empty), step(hooked, batch, probe), rounds=options.rounds, steps=options.steps
            )
        print(f"| {label} | {extra / count:.2f} |", flush=True)


def step(model: nn.Module, batch: Tensor, probe: instrument.Probe) -> Callable[[], object]:
    """Return a function that runs a forward pass and ends the step."""

    def run() -> None:
        model(batch)
        probe.end_step()

    return run


if __name__ == "__main__":
    main()
