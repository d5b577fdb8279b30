"""Steps with recorded operators: `torchrun --nproc-per-node 2 operator_processes.py FOLDER NAMES`; without torchrun in one process.

Each training has the name of its optimizer, its dtype or a fault, after `fsdp_` if it is sharded, and writes the run
FOLDER/<number of processes>/<name>. The last process has the fault.
"""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import instrument

FAULTS = ("epsilon", "stale", "dropout", "gradient", "bias_gradient", "rate", "decay")
WIDTH = 16


class Block(nn.Module):
    """A block of a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.up, self.act, self.dropout, self.down = (
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.GELU(),
            nn.Dropout(0.1),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (2, -1)).transpose(1, 2) for each in self.attention(self.norm(x)).chunk(3, -1))
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        result: Tensor = x + self.down(self.dropout(self.act(self.up(x))))
        return result


def model() -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Embedding(11, WIDTH), *(Block() for _ in range(2)), nn.Linear(WIDTH, 11))
    for module in made.modules():
        if isinstance(module, nn.Dropout):
            module.eval()
    return made


def corrupt(made: Any, optimizer: torch.optim.Optimizer, fault: str) -> None:
    """Add a fault to this process, mostly to the second block."""
    block = made[2]
    if fault == "epsilon":
        block.norm.eps = 1e-3
    elif fault == "stale":
        block.up.weight.data.mul_(1.01)
    elif fault == "dropout":
        block.dropout.train()
    elif fault == "gradient":
        block.down.register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * 0.99,))
    elif fault == "bias_gradient":
        block.up.bias.register_hook(lambda gradient: gradient * 0.99)
    elif fault == "rate":
        optimizer.param_groups[0]["lr"] *= 1.01
    elif fault == "decay":
        optimizer.param_groups[0]["weight_decay"] = 0.01


def train(folder: Path, name: str) -> None:
    kind = name.removeprefix("fsdp_")
    fault, optimizer = kind if kind in FAULTS else "", "AdamW" if kind == "AdamW" else "SGD"
    dtype = torch.bfloat16 if kind == "bf16" else torch.float32
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    plain = model()
    made: Any = plain
    if size > 1:
        for part in (*plain[1:3], plain) if "fsdp" in name else ():
            fully_shard(part)
        made = plain if "fsdp" in name else DistributedDataParallel(plain)
    stepped = getattr(torch.optim, optimizer)(made.parameters(), lr=0.1)
    if fault and rank == size - 1 and size > 1:
        corrupt(plain, stepped, fault)
    tokens = torch.randint(0, 11, (8, 9), generator=torch.Generator().manual_seed(1))
    batch = tokens.chunk(size)[rank]
    with instrument.attach(made, {}, optimizer=stepped, out=folder / str(size) / name) as probe:
        for _ in range(1 if fault else 2):
            with probe.record_operators():
                stepped.zero_grad()
                with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
                    logits = made(batch[:, :-1])
                nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten()).backward()
                stepped.step()
            probe.end_step()


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder, size = Path(sys.argv[1]), int(os.environ.get("WORLD_SIZE", "1"))
    if size > 1:
        dist.init_process_group("gloo")
    for name in sys.argv[2:]:
        train(folder, name)
    if size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
