"""Loops of one's own in several processes: `torchrun --nproc-per-node 2 ranked.py FOLDER`."""

from __future__ import annotations

import json
import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import instrument
import instrument.folders.run_folder

HOOKS = {
    "seen": {
        "layers": "**",
        "kind": "forward",
        "action": "record",
        "stats": ["default", "l1", "dead_fraction"],
        "quantiles": [0.25, 0.5],
        "histogram": 64,
    },
    "grads": {"layers": "**", "kind": "parameter_grad", "action": "record"},
    "sums": {"layers": "**", "kind": "post_accumulate_grad", "action": "record"},
    "units": {"layers": "**", "kind": "step_post", "role": "param", "action": "record", "stats": ["dead_fraction"]},
    "kept": {"layers": "2", "kind": "forward", "action": "record", "stats": "none", "tensors": True},
}
STEPS = 3
OPTIMIZER = partial(torch.optim.SGD, lr=0.1)


def net() -> nn.Sequential:
    """Five units of its first layer are dead; its last one has no equal shards."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    with torch.no_grad():
        made[0].weight[:5] = made[0].bias[:5] = 0.0  # type: ignore[index,operator]
    return made


def refused(model: nn.Module, place: Path | None = None, **asked: Any) -> bool:
    """Whether this is a mistake, in this process too."""
    try:
        with instrument.attach(
            model, asked.pop("hooks", HOOKS), optimizer=OPTIMIZER(model.parameters()), out=place, **asked
        ):
            return False
    except instrument.ConfigError:
        return True


class Uneven(nn.Module):
    """A part of it is called by the first process only."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.always(x)
        return y + self.sometimes(x).detach() if dist.get_rank() == 0 else y


def data(step: int) -> Tensor:
    """The samples of all processes."""
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, place: Path, reduce: str, fail_at: int = -1, die_at: int = -1) -> dict[str, float]:
    hooks = {name: spec for name, spec in HOOKS.items() if name == "seen" or not isinstance(model, Uneven)}
    optimizer = OPTIMIZER(model.parameters())
    rank, size = dist.get_rank(), dist.get_world_size()
    with instrument.attach(model, hooks, optimizer=optimizer, out=place, reduce=reduce) as probe:  # type: ignore[arg-type]
        for step in range(STEPS):
            optimizer.zero_grad()
            loss = model(data(step).chunk(size)[rank]).square().mean()
            if step == die_at and rank == size - 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if step == fail_at:
                raise ValueError("enough")
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    assert probe.ranks is not None
    tensors = sum(live.fired for live in probe.lives if live.site.spec.name == "seen")
    return {"bytes": probe.ranks.bytes_sent, "tensors": tensors}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    told = {}
    if len(sys.argv) > 2:
        train(DistributedDataParallel(net()), folder, "global", die_at=int(sys.argv[2]))
    for reduce in ("none", "global"):
        told[reduce] = train(DistributedDataParallel(net()), folder / reduce, reduce)
    sharded = net()
    fully_shard(sharded)
    train(sharded, folder / "sharded", "global")
    train(Uneven(), folder / "uneven", "global")
    try:
        train(DistributedDataParallel(net()), folder / "failed", "global", fail_at=1)
    except ValueError:
        told["failed"] = {}
    instrument.folders.run_folder.PATIENCE = 2.0
    micro = {"h": {"layers": "0", "kind": "parameter_grad_micro", "action": "record"}}
    mistakes = {
        "taken": refused(DistributedDataParallel(net()), folder / "none"),
        "budget": refused(DistributedDataParallel(net()), reduce="global", budget={"time": "5%"}),
        "reduce": refused(net(), reduce="globl"),
        "micro": refused(sharded, hooks=micro),
    }
    everywhere: list[dict[str, bool]] = [{}, {}]
    dist.all_gather_object(everywhere, mistakes)
    told["refused"] = everywhere  # type: ignore[assignment]
    if dist.get_rank() == 0:
        print(json.dumps(told), flush=True)
    dist.barrier()
    dist.destroy_process_group()
