"""Custom training loops in several processes: `torchrun --nproc-per-node 2 distributed_loop.py FOLDER`."""

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
import instrument.storage.run_folder
from instrument.probe import collectives

RECORD: dict[str, Any] = {"layers": "**", "kind": "forward", "action": "record"}
HOOKS = {
    "seen": {**RECORD, "stats": ["default", "l1", "dead_fraction"], "quantiles": [0.25, 0.5], "histogram": 64},
    "grads": {**RECORD, "kind": "parameter_grad"},
    "sums": {**RECORD, "kind": "post_accumulate_grad"},
    "units": {**RECORD, "kind": "step_post", "role": "param", "stats": ["dead_fraction"]},
    "kept": {**RECORD, "layers": "2", "stats": "none", "tensors": True},
}
STEPS = 3
OPTIMIZER = partial(torch.optim.SGD, lr=0.1)


def create_model() -> nn.Sequential:
    """Create a model with five dead units in its first layer and a last layer that cannot be sharded evenly."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
    with torch.no_grad():
        model[0].weight[:5] = model[0].bias[:5] = 0.0  # type: ignore[index,operator]
    return model


def refused(model: nn.Module, folder: Path | None = None, **options: Any) -> bool:
    """Return whether `attach` raises a ConfigError in this process."""
    try:
        with instrument.attach(
            model, options.pop("hooks", HOOKS), optimizer=OPTIMIZER(model.parameters()), out=folder, **options
        ):
            return False
    except instrument.ConfigError:
        return True


class LayerOnRank0(nn.Module):
    """Model with a layer that only rank 0 calls."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.always(x)
        return y + self.sometimes(x).detach() if dist.get_rank() == 0 else y


def data(step: int) -> Tensor:
    """Return the samples of all processes at a step."""
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, folder: Path, reduce: str, fail_at: int = -1, die_at: int = -1) -> dict[str, float]:
    hooks = HOOKS if collectives.MAX_GATHERED else {"seen": RECORD}
    if isinstance(model, LayerOnRank0):
        hooks = {"seen": HOOKS["seen"], "plain": RECORD}
    optimizer = OPTIMIZER(model.parameters())
    rank, size = dist.get_rank(), dist.get_world_size()
    with instrument.attach(model, hooks, optimizer=optimizer, out=folder, reduce=reduce) as probe:  # type: ignore[arg-type]
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
    tensors = sum(attached.fired for attached in probe.attached_hooks if attached.site.spec.name == "seen")
    return {"bytes": probe.ranks.bytes_sent, "tensors": tensors}


INTEGERS = (  # the tensor of each rank; None: it does not call the model
    (torch.tensor([2**62 + 1, 5]), torch.tensor([2**62 + 3, -(2**62) - 7])),
    (torch.tensor([3, 4]), torch.tensor([2**53 + 1])),
    (torch.tensor([2**64 - 1, 9], dtype=torch.uint64), torch.tensor([2**63 + 1], dtype=torch.uint64)),
    (torch.tensor([], dtype=torch.int64), torch.tensor([-(2**60) - 1])),
    (torch.tensor([7]), torch.tensor([2**53])),
    (torch.tensor([2**61 + 1, 2**61 + 3]), None),
)


def record_integers(folder: Path) -> None:
    """Record `INTEGERS`, each in a step, with dead units in the same rows."""
    model = nn.Identity()
    hook = {"layers": ".", "kind": "forward", "action": "record", "stats": ["default", "dead_fraction"]}
    with instrument.attach(model, {"ids": hook}, out=folder, reduce="global") as probe:
        for tensors in INTEGERS:
            if (tensor := tensors[dist.get_rank()]) is not None:
                model(tensor[:, None])
            probe.end_step()


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    dist.init_process_group("gloo")
    results = {}
    if len(sys.argv) > 2:
        train(DistributedDataParallel(create_model()), folder, "global", die_at=int(sys.argv[2]))
    for reduce in ("none", "global"):
        results[reduce] = train(DistributedDataParallel(create_model()), folder / reduce, reduce)
    sharded = create_model()
    fully_shard(sharded)
    train(sharded, folder / "sharded", "global")
    train(LayerOnRank0(), folder / "uneven", "global")
    record_integers(folder / "integers")
    try:
        train(DistributedDataParallel(create_model()), folder / "failed", "global", fail_at=1)
    except ValueError:
        results["failed"] = {}
    collectives.MAX_GATHERED = 0
    train(DistributedDataParallel(create_model()), folder / "reduced", "global")
    instrument.storage.run_folder.RANK_0_TIMEOUT = 0.5
    micro = {"h": {"layers": "0", "kind": "parameter_grad_micro", "action": "record"}}
    problems = {
        "taken": refused(DistributedDataParallel(create_model()), folder / "none"),
        "budget": refused(DistributedDataParallel(create_model()), reduce="global", budget={"time": "5%"}),
        "reduce": refused(create_model(), reduce="globl"),
        "micro": refused(sharded, hooks=micro),
    }
    refusals_of_ranks: list[dict[str, bool]] = [{}, {}]
    dist.all_gather_object(refusals_of_ranks, problems)
    results["refused"] = refusals_of_ranks  # type: ignore[assignment]
    if dist.get_rank() == 0:
        print(json.dumps(results), flush=True)
    dist.barrier()
    dist.destroy_process_group()
