"""A custom loop with a pipeline of two stages, one in each process: `own_pipeline.py SCHEDULE`."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

import instrument

STEPS, MICRO_BATCHES = 2, 4
HOOKS: dict[str, Any] = {
    kind: {"layers": "?*", "kind": kind, "action": "record"} for kind in ("forward", "full_backward", "parameter_grad")
}


def create() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


def batch() -> tuple[Tensor, Tensor]:
    """Return the inputs [8, 6] and the targets [8, 3]."""
    inputs, targets = torch.randn(8, 9, generator=torch.Generator().manual_seed(1)).split([6, 3], dim=1)
    return inputs, targets


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the part of a micro-batch in the mean of all samples."""
    return nn.functional.mse_loss(outputs, targets) / MICRO_BATCHES


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    full = create()
    own = nn.Sequential()
    for name in ("01", "234")[rank]:
        own.add_module(name, full[int(name)])
    given, returned = [
        (torch.empty(2, 6), torch.empty(2, 8, requires_grad=True)),
        (torch.empty(2, 8, requires_grad=True), torch.empty(2, 3, requires_grad=True)),
    ][rank]
    stage = PipelineStage(own, rank, 2, torch.device("cpu"), input_args=given, output_args=returned)
    schedule_type: Any = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}[sys.argv[1]]
    schedule = schedule_type(stage, MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
    inputs, targets = batch()
    with instrument.attach(own, HOOKS, optimizer=optimizer, out="runs/mine") as probe:
        for _ in range(STEPS):
            losses: list[Tensor] = []
            optimizer.zero_grad()
            schedule.step(*() if rank else (inputs,), target=targets if rank else None, losses=losses if rank else None)
            optimizer.step()
            probe.end_step(loss=torch.stack(losses).sum() if losses else None)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
