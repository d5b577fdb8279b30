"""Collective operations of two processes: `torchrun --nproc-per-node 2 collective_processes.py FOLDER`.

Rank 0 prints the results of both processes, by scenario.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from rank_results import print_results
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import instrument
from instrument.config.spec_file import read_specs

RECORD = {"layers": "**", "action": "record"}
COLLECTIVE: dict[str, Any] = {"kind": "collective", "action": "record"}
SENT, GOT = {**COLLECTIVE, "tensors": True}, {**COLLECTIVE, "tensors": True, "role": "output"}
FAULT = {"kind": "collective", "action": "modify", "fn": "zero"}


def numbers(count: int = 2, *, offset: int = 0) -> Tensor:
    """Return 10, 11, ... in rank 0 and 20, 21, ... in rank 1."""
    return torch.arange(float(count)) + 10 * (dist.get_rank() + 1) + offset


def lists(count: int = 2) -> list[Tensor]:
    return [torch.empty(count) for _ in range(2)]


def waited(work: Any) -> None:
    work.wait()


def operations() -> dict[str, Callable[[], Any]]:
    """Return one call of each collective operation."""
    is_first, world = dist.get_rank() == 0, [0, 1]
    return {
        "all_reduce": lambda: dist.all_reduce(numbers()),
        "all_reduce max": lambda: waited(dist.all_reduce(numbers(), dist.ReduceOp.MAX, async_op=True)),
        "all_reduce functional": lambda: functional.all_reduce(numbers(), "sum", world) + 1,
        "all_gather": lambda: dist.all_gather(lists(), numbers()),
        "all_gather tensor": lambda: dist.all_gather_into_tensor(torch.empty(4), numbers()),
        "all_gather functional": lambda: functional.all_gather_tensor(numbers(), 0, world) + 1,
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(1), [numbers(1), numbers(1, offset=5)]),
        "reduce_scatter async": lambda: waited(dist.reduce_scatter_tensor(torch.empty(1), numbers(), async_op=True)),
        "reduce_scatter functional": lambda: functional.reduce_scatter_tensor(numbers(), "sum", 0, world) + 1,
        "broadcast": lambda: dist.broadcast(numbers(), 1),
        "reduce": lambda: dist.reduce(numbers(), 0),
        "gather": lambda: dist.gather(numbers(), lists() if is_first else None),
        "scatter": lambda: dist.scatter(torch.empty(1), [numbers(1), numbers(1, offset=5)] if is_first else None),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty(2), numbers()),
    }


def record_operations() -> dict[str, Any]:
    """Call each operation in a step. Return the recorded tensors by operation, role and path, and the rows of the first one."""
    calls = operations()
    with instrument.attach(nn.Identity(), {"sent": SENT, "got": GOT}) as probe:
        for call in calls.values():
            call()
            probe.end_step()
        with torch.inference_mode():
            dist.all_reduce(numbers())
    names = [*calls, "inference"]
    tensors: dict[str, dict[str, Any]] = {name: {} for name in names}
    for row in probe.tensors().itertuples():
        tensors[names[row.step]][f"{row.role} {row.path}"] = row.values.tolist()
    columns = ["role", "path", "operation", "reduction", "ranks", "dtype", "bytes", "scope", "rank"]
    rows = json.loads(probe.collectives.query("step == 1")[columns].to_json(orient="records"))
    seconds = probe.collectives["seconds"]
    return {"tensors": tensors, "rows": rows, "are_timed": bool((seconds > 0).all()), "coverage": causes(probe)}


def causes(probe: Any) -> dict[str, Any]:
    return {row["hook"]: [row["expected"], row["fired"], row["cause"]] for row in probe.coverage()}


def create(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    if kind == "ddp":
        return DistributedDataParallel(model, bucket_cap_mb=0.0003)  # several buckets
    fully_shard(model)
    return model


def train(
    kind: str, hooks: dict[str, Any], steps: int = 3, accumulate: int = 1, **options: Any
) -> tuple[list[float], Any]:
    """Train for some steps. Return the final parameters of this process and the probe."""
    model = create(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(dist.get_rank())
    with instrument.attach(model, hooks, optimizer=optimizer, **options) as probe:
        for _ in range(steps):
            optimizer.zero_grad()
            for micro_step in range(accumulate):
                is_last = micro_step == accumulate - 1
                with nullcontext() if is_last else model.no_sync():  # type: ignore[operator]
                    model(torch.randn(8, 6, generator=generator)).square().mean().backward()
                if not is_last:
                    probe.end_micro_step()
            optimizer.step()
            probe.end_step()
    local = [each.to_local() if hasattr(each, "to_local") else each for each in model.parameters()]
    return torch.cat([each.detach().flatten() for each in local]).tolist(), probe


def train_joined(hooks: Any, fault: int | None = None) -> tuple[list[float], Any]:
    """Train, with more batches in one process. The wrapper divides by the number of processes that still have batches.

    Args:
        fault: The step in which process 1 sends zeros in place of its gradients.
    """
    model: Any = create("ddp")
    generator = torch.Generator().manual_seed(dist.get_rank())
    lost = {**FAULT, "functions": "all_reduce", "ranks": [1], "steps": [fault]}
    given = {**({} if fault is None else {"lost": lost}), **read_specs(hooks)}
    with instrument.attach(model, given) as probe, Join([model], divide_by_initial_world_size=False):
        for _ in range(2 + dist.get_rank()):
            model.zero_grad()
            model(torch.randn(8, 6, generator=generator)).square().mean().backward()
            probe.end_step()
    return [norm.item() for norm in map(torch.norm, (each.grad for each in model.parameters()))], probe


def train_locally() -> list[Any]:
    """Train replicas that are not synchronized. Return the scope and the norm of a gradient in the rows, and the norm of this process."""
    model: Any = create("ddp")
    model.register_comm_hook(PostLocalSGDState(None, dist.new_subgroups(1)[0], 0), post_localSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hooks = {"used": {**RECORD, "kind": "parameter_grad", "layers": "0"}}
    with instrument.attach(model, hooks, optimizer=optimizer, reduce="global") as probe:
        model(numbers(48).view(8, 6)).square().mean().backward()
        expected = model.module[0].weight.grad.norm().item()
        optimizer.step()
        probe.end_step()
    return [*probe.stats.query("path == 'weight'")[["scope", "l2"]].to_numpy().tolist(), expected]


def messages_of_zeros(probe: Any) -> list[Any]:
    return probe.events.query("rule == 'zero_message'")[["step", "location"]].values.tolist()


def trainings(folder: Path) -> dict[str, Any]:
    """Train without hooks, with record hooks, and with faults."""
    record = {"sent": SENT, "got": GOT}
    found: dict[str, Any] = {}
    for kind in ("ddp", "fsdp2"):
        bare, _ = train(kind, {})
        recorded, probe = train(
            kind, {**record, "clip": {**RECORD, "kind": "parameter_grad", "action": "clip", "norm": 1e9}}
        )
        found[kind] = {"is_identical": bare == recorded, "coverage": causes(probe)}
        found[kind]["tensors"] = [
            [row.step, row.role, row.path, row.values.astype(float).tolist()]
            for row in probe.tensors().itertuples()
            if row.path.startswith(("all_reduce", "reduce_scatter", "all_gather"))
        ]
    _, probe = train("ddp", {"sent": {**SENT, "functions": "all_reduce"}}, accumulate=2)
    found["accumulated"] = [causes(probe), sorted({*probe.stats["micro_step"]})]
    _, probe = train("ddp", {**record, "weights": {**RECORD, "kind": "forward"}}, reduce="global")
    found["merged"] = causes(probe)
    norms, probe = train_joined("messages")
    found["joined"] = train_joined({})[0] == norms
    sent = probe.stats.query("role == 'input' and numel >= 32")
    found["join"] = [messages_of_zeros(probe), sorted({*sent[sent["zero_fraction"] == 1]["path"]})]
    found["join with a fault"] = messages_of_zeros(train_joined("messages", fault=1)[1])
    lost = {**FAULT, "functions": "all_reduce", "fraction": 0.01, "ranks": [1]}
    train("ddp", {"lost": lost, **read_specs("messages")}, steps=80, out=folder / "faults", seed=3)
    return found


def change_results() -> dict[str, Any]:
    """Change what is sent and what is received in one process."""
    found: dict[str, Any] = {}
    for name, hook in {"sent": {**FAULT, "ranks": [0]}, "got": {**FAULT, "ranks": [0], "role": "output"}}.items():
        with instrument.attach(nn.Identity(), {"fault": hook, "all": GOT}) as probe:
            kept, shards, copies = numbers(), lists(), numbers()
            dist.all_reduce(kept)
            dist.all_gather(shards, copies)
            dist.broadcast(copies, 0)
            dist.broadcast_object_list([{"rank": 0}], 0)  # integers, which an intervention leaves unchanged
            probe.end_step()
        found[name] = [kept.tolist(), torch.cat(shards).tolist(), copies.tolist(), causes(probe)["fault"]]
    return found


def nested() -> dict[str, Any]:
    """Attach two probes at once."""
    counts, is_installed = [], []
    with instrument.attach(nn.Identity(), {"sent": SENT}) as outer:
        with instrument.attach(nn.Identity(), {"sent": {**SENT, "steps": [0]}}) as inner:
            for probe in (outer, inner):
                dist.all_reduce(numbers())
                probe.end_step()
        is_installed.append(installed())
        dist.all_reduce(numbers())
        outer.end_step()
    is_installed.append(installed())
    for probe in (outer, inner):
        counts.append(probe.stats["path"].tolist())
    return {"paths": counts, "is_installed": is_installed}


def installed() -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect")


def refused(**fields: Any) -> str:
    try:
        with instrument.attach(nn.Identity(), {"sent": {**SENT, **fields}}):
            return ""
    except instrument.ConfigError as error:
        return str(error)


def failing() -> str:
    """Return the error of a hook that fails when an asynchronous operation is complete."""

    def fail(tensor: Tensor) -> float:
        raise ValueError("no number")

    hook = {**COLLECTIVE, "role": "output", "stats": [{"_target_": fail, "name": "failing"}]}
    try:
        with instrument.attach(nn.Identity(), {"failing": hook}):
            waited(dist.all_reduce(numbers(), async_op=True))
    except (instrument.HookError, RuntimeError) as error:
        return str(error)
    return ""


def results() -> dict[str, Any]:
    return {
        "operations": record_operations(),
        "trainings": trainings(Path(sys.argv[1])),
        "changes": change_results(),
        "nested": nested(),
        "local": train_locally(),
        "refused": refused(ranks=[0, 2]),
        "failing": failing(),
        "is_installed": installed(),
    }


if __name__ == "__main__":
    print_results(results)
