"""A custom loop in processes with separate folders: `separate_loop.py ADDRESS`."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import instrument

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
hooks = {"seen": {"layers": "**", "kind": "forward", "action": "record"}}
with instrument.attach(model, hooks, out="runs/mine", remote=sys.argv[1]) as probe:
    for _ in range(3):
        model(torch.randn(4, 3)).sum().backward()
        probe.end_step()
dist.barrier()
dist.destroy_process_group()
