"""A custom loop in processes with separate folders, or in some processes: `separate_loop.py [ADDRESS]`.

With an address, each process has a folder. Without one, the processes of even rank share a folder, and the others record nothing.
"""

from __future__ import annotations

import contextlib
import sys

import torch
import torch.distributed as dist

import instrument

dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
hooks = {"seen": {"layers": "**", "kind": "forward", "action": "record"}}
remote = sys.argv[1] if len(sys.argv) > 1 else None
is_recorded = remote is not None or dist.get_rank() % 2 == 0
attached = instrument.attach(model, hooks, out="runs/mine", remote=remote) if is_recorded else contextlib.nullcontext()
with attached as probe:
    for _ in range(3):
        model(torch.randn(4, 3)).sum().backward()
        if probe is not None:
            probe.end_step()
dist.barrier()
dist.destroy_process_group()
