"""Trap: what nobody thought of. Random networks of the operations that hooks stumble over, hooked everywhere.

Views, writes in place, chunks of which one is not used, inputs given out as they are, parameters given out, nested
outputs, None, detached parts, modules called several times: recording must change no bit, and scaling by one no number.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from places import CHANGES, PLACES, records
from tiers import portions
from torch import Tensor, nn

import instrument

WIDTH, SAMPLES = 4, 3
RECORDS = records(PLACES)


def in_place(x: Tensor) -> bool:
    """Whether PyTorch lets an operation write to it."""
    return x.grad_fn is not None


def wrote(x: Tensor) -> Tensor:
    """A part of it, written to."""
    y = x * 1.0
    y[:, :2].mul_(0.5)
    return y


def added(x: Tensor) -> Tensor:
    y = x.sin()
    y += x
    return y


OPERATIONS: dict[str, Callable[[Part, Tensor], Any]] = {
    "linear": lambda part, x: part.linear(x),
    "linear, and its input": lambda part, x: (part.linear(x), x),
    "relu": lambda part, x: torch.relu_(x) if in_place(x) else torch.relu(x),
    "times": lambda part, x: x.mul_(1.1) if in_place(x) else x * 1.1,
    "identity": lambda part, x: x,
    "view": lambda part, x: x.view(-1).view(x.shape),
    "halves, joined": lambda part, x: torch.cat([half * 0.7 for half in x.chunk(2, -1)[::-1]], -1),
    "halves": lambda part, x: x.chunk(2, -1),
    "part written": lambda part, x: wrote(x),
    "dict": lambda part, x: {"a": x * 0.9, "b": [x, None]},
    "parameter": lambda part, x: part.own,
    "added": lambda part, x: added(x),
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
    """Operations drawn at random, each on something that was computed before; some of them are called again."""

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
    """A step; the loss and all gradients, zeros where there is none."""
    batch = torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(9))
    network.zero_grad()
    with instrument.attach(network, hooks) as probe:
        loss = network(batch)
        loss.backward()
        probe.end_step()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in network.parameters()]
    return [loss.detach().clone(), *gradients], probe


def bare(network: Network) -> list[Tensor] | None:
    """None where PyTorch itself refuses: something was written to that the backward pass needs."""
    try:
        return train(network, {})[0]
    except RuntimeError:
        return None


def check(seeds: range) -> tuple[int, int]:
    """How many networks were compared, and how many rows they gave."""
    compared = rows = 0
    for seed in seeds:
        network = Network(seed, list(OPERATIONS))
        wanted = bare(network)
        if wanted is None:
            continue
        mine, probe = train(network, RECORDS)
        told = [part.operation for part in network.parts]
        assert all(map(torch.equal, mine, wanted)), (seed, told)
        table = probe.sink.frame("tensors")
        assert not table.duplicated(["hook", "layer", "path", "call", "backward"]).any(), (seed, told)
        compared, rows = compared + 1, rows + len(table)
    return compared, rows


def check_changes(seeds: range) -> int:
    """How many networks were compared. A leaf given out is left out: what is a view of it, nothing may write to."""
    compared = 0
    for seed in seeds:
        network = Network(seed, [name for name in OPERATIONS if name != "parameter"])
        wanted = bare(network)
        if wanted is None:
            continue
        for kind, role in CHANGES:
            once = {"layers": "**", "kind": kind, "role": role, "action": "scale", "factor": 1.0}
            mine, _ = train(network, {"once": once})
            for got, value in zip(mine, wanted, strict=True):
                torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-5, msg=f"seed {seed}, {kind} {role}")
        compared += 1
    return compared


@pytest.mark.parametrize("seeds", portions(50, 4_000, 650))
def test_recording_changes_no_bit_of_any_network(seeds: range) -> None:
    compared, rows = check(seeds)
    assert compared > 0.7 * len(seeds)
    assert rows > 20 * compared


@pytest.mark.parametrize("seeds", portions(40, 2_000, 380))
def test_scaling_by_one_changes_no_number_of_any_network(seeds: range) -> None:
    assert check_changes(seeds) > 0.7 * len(seeds)
