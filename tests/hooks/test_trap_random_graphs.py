"""Trap: unforeseen combinations. Random networks of operations that are difficult for hooks, hooked at every point.

Views, in-place writes, unused chunks, returned inputs, returned parameters, nested outputs, None, detached tensors,
modules called several times: recording must be bit-identical, and scaling by one must change no value.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hook_locations import INTERVENTION_LOCATIONS, LOCATIONS, record_hooks
from hook_runs import run_step, scale
from tiers import portions
from torch import Tensor, nn

import instrument

WIDTH, SAMPLES = 4, 3
RECORDS = record_hooks(LOCATIONS)


def allows_in_place(x: Tensor) -> bool:
    """Return whether PyTorch allows in-place operations on the tensor."""
    return x.grad_fn is not None


def write_to_slice(x: Tensor) -> Tensor:
    """Return a copy of which a slice was written in place."""
    y = x * 1.0
    y[:, :2].mul_(0.5)
    return y


def add_in_place(x: Tensor) -> Tensor:
    y = x.sin()
    y += x
    return y


OPERATIONS: dict[str, Callable[[Part, Tensor], Any]] = {
    "linear": lambda part, x: part.linear(x),
    "linear, and its input": lambda part, x: (part.linear(x), x),
    "relu": lambda part, x: torch.relu_(x) if allows_in_place(x) else torch.relu(x),
    "times": lambda part, x: x.mul_(1.1) if allows_in_place(x) else x * 1.1,
    "identity": lambda part, x: x,
    "view": lambda part, x: x.view(-1).view(x.shape),
    "halves, joined": lambda part, x: torch.cat([half * 0.7 for half in x.chunk(2, -1)[::-1]], -1),
    "halves": lambda part, x: x.chunk(2, -1),
    "part written": lambda part, x: write_to_slice(x),
    "dict": lambda part, x: {"a": x * 0.9, "b": [x, None]},
    "parameter": lambda part, x: part.own,
    "add_in_place": lambda part, x: add_in_place(x),
    "turned": lambda part, x: x.t().contiguous().t(),
    "detached": lambda part, x: (x.detach(), x * 0.8),
    "tanh": lambda part, x: torch.tanh(x),
}


class Part(nn.Module):
    """One operation."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        self.operation = operation
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.own = nn.Parameter(torch.randn(SAMPLES, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return OPERATIONS[self.operation](self, x)


class Network(nn.Module):
    """Random operations, each on an earlier result; some modules are called again."""

    def __init__(self, seed: int, operations: list[str]) -> None:
        super().__init__()
        self.seed = seed
        drawn = random.Random(seed)
        torch.manual_seed(seed)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ModuleList([Part(drawn.choice(operations)) for _ in range(drawn.randint(3, 8))])

    def forward(self, x: Tensor) -> Tensor:
        drawn = random.Random(self.seed + 1)
        pool = [self.first(x)]
        order = [*range(len(self.parts)), *(drawn.randrange(len(self.parts)) for _ in range(drawn.randint(0, 3)))]
        for i in order:
            self.collect(pool, self.parts[i](drawn.choice(pool)))
            if drawn.random() < 0.3:
                pool.append(drawn.choice(pool) + pool[-1] * 0.3)
        return torch.stack([(0.1 * i + 0.5) * each.sum() for i, each in enumerate(pool[-4:])]).sum()

    def collect(self, pool: list[Tensor], value: Any) -> None:
        if isinstance(value, Tensor):
            pool.append(value if value.shape[-1] == WIDTH else torch.cat([value, value], -1))
        elif isinstance(value, dict | list | tuple):
            for item in value.values() if isinstance(value, dict) else value:
                self.collect(pool, item)


def train(network: Network, hooks: dict[str, Any]) -> tuple[list[Tensor], instrument.Probe]:
    """Run a step; return the loss and all gradients, zeros where a gradient is missing."""
    batch = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(9))
    network.zero_grad()
    loss, probe = run_step(network, hooks, batch, loss=torch.sum)
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in network.parameters()]
    return [loss.detach().clone(), *gradients], probe


def train_uninstrumented(network: Network) -> list[Tensor] | None:
    """Train without hooks; return None if PyTorch refuses because a tensor needed for backward was overwritten."""
    try:
        return train(network, {})[0]
    except RuntimeError:
        return None


@pytest.mark.parametrize("seeds", portions(5, 1_000, 199))
def test_recording_is_bit_identical_on_random_networks(seeds: range) -> None:
    compared = rows = 0
    for seed in seeds:
        network = Network(seed, list(OPERATIONS))
        wanted = train_uninstrumented(network)
        if wanted is None:
            continue
        actual, probe = train(network, RECORDS)
        operations = [part.operation for part in network.parts]
        assert all(map(torch.equal, actual, wanted)), (seed, operations)
        table = probe.sink.frame("tensors")
        assert not table.duplicated(["hook", "layer", "path", "call", "backward"]).any(), (seed, operations)
        compared, rows = compared + 1, rows + len(table)
    assert compared > 0.7 * len(seeds)
    assert rows > 20 * compared


@pytest.mark.slow
@pytest.mark.parametrize("seeds", portions(12, 300, 96))
def test_scaling_by_one_is_neutral_on_random_networks(seeds: range) -> None:
    """Returned leaves are excluded: views of them are read-only."""
    compared = 0
    for seed in seeds:
        network = Network(seed, [name for name in OPERATIONS if name != "parameter"])
        wanted = train_uninstrumented(network)
        for kind, role in INTERVENTION_LOCATIONS if wanted is not None else ():
            actual, _ = train(network, {"once": scale(kind, 1.0, "**", role=role)})
            for got, value in zip(actual, wanted, strict=True):
                torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-5, msg=f"seed {seed}, {kind} {role}")
        compared += wanted is not None
    assert compared > 0.7 * len(seeds)
