"""A custom loop with experts that are divided over two processes with different samples: `own_experts.py`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from distributed_models import ExpertParallel, MixtureOfExperts
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

import instrument

STEPS = 2
HOOKS: dict[str, Any] = {
    kind: {"layers": "?*", "kind": kind, "action": "record"} for kind in ("forward", "parameter_grad")
}
DECLARED = {"**": {"input": {"dp": "shard(0)"}, "output": {"dp": "shard(0)"}}}


def create() -> nn.Module:
    torch.manual_seed(0)
    return MixtureOfExperts()


def batch() -> Tensor:
    return torch.randn(16, 64, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, inputs: Tensor, **options: Any) -> Any:
    """Train with the mean loss of all processes, and return the probe."""
    processes = dist.get_world_size() if dist.is_initialized() else 1
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with instrument.attach(model, HOOKS, optimizer=optimizer, **options) as probe:
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = model(inputs).square().mean() / processes
            loss.backward()
            for parameter in model.parameters() if processes > 1 else ():
                if parameter.grad is not None and not isinstance(parameter.grad, DTensor):
                    dist.all_reduce(parameter.grad)
            optimizer.step()
            probe.end_step(loss=loss)
    return probe


def main() -> None:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    for name, declared in (("unknown", {}), ("declared", DECLARED)):
        model = parallelize_module(create(), mesh, {"experts": ExpertParallel()})
        inputs = batch().chunk(2)[dist.get_rank()]
        train(model, inputs, out=f"runs/{name}", reduce="global", placement=declared)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
