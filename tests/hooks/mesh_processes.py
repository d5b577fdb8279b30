"""A transformer on a device mesh: `torchrun --nproc-per-node 2 mesh_processes.py FOLDER tp`, with 4 processes `... FOLDER dp_tp`.

Rank 0 prints the results of all processes. The other functions are those with which the tests train the same model in one process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rank_results import print_results
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

import instrument

STEPS, BATCH, TOKENS, WIDTH, HIDDEN, HEADS, CLASSES = 2, 4, 6, 8, 16, 4, 10


def of_large_values(gradient: Tensor, context: Any) -> Tensor:
    """Return the gradient where its tensor is above the mean of the full tensor."""
    return torch.where(context.value > context.value.mean(), gradient, 0.0)


RECORD: dict[str, Any] = {"layers": "**", "action": "record"}
HOOKS: dict[str, Any] = {
    "seen": {
        **RECORD,
        "kind": "forward",
        "stats": ["default", "l1", "dead_fraction", "kurtosis", "negative_fraction", "token_cosine", "softmax_entropy"],
        "quantiles": [0.25, 0.5],
        "histogram": 16,
    },
    "given": {**RECORD, "kind": "forward_pre"},
    "added": {**RECORD, "layers": "blocks.*", "kind": "forward", "role": "change", "stats": ["branch_ratio", "input_cosine"]},
    "back": {**RECORD, "kind": "full_backward"},
    "total": {**RECORD, "kind": "tensor"},
    "grads": {**RECORD, "kind": "parameter_grad", "stats": ["default", "previous_cosine"]},
    "weights": {**RECORD, "kind": "step_post", "role": "param", "stats": ["default", "dead_fraction", "unit_norm_cv"], "spectrum": 4},
    "updates": {**RECORD, "kind": "step_post", "role": "update", "stats": ["default", "update_ratio"]},
    "spectra": {**RECORD, "layers": ["**.up", "**.down", "**.norm"], "kind": "forward", "stats": "none", "spectrum": 4},
    "cast": {**RECORD, "layers": "**.act", "kind": "forward", "stats": "none", "cast": {"to": "float8_e4m3fn", "scale": 0.01}},
    "called": {**RECORD, "types": "Linear", "kind": "function", "functions": "linear"},
    "kept": {**RECORD, "layers": "blocks.0.up", "kind": "forward", "stats": "none", "tensors": True},
    "stored": {**RECORD, "layers": "**.down", "kind": "step_post", "role": "param", "stats": "none", "tensors": True},
    "some": {**RECORD, "layers": "**.up", "kind": "forward", "units": [1, 12]},
    "each": {**RECORD, "layers": "**.act", "kind": "forward", "split_dim": 2, "stats": ["mean", "std"]},
    "tame": {"layers": "**.act", "kind": "forward", "action": "clip", "norm": 3.0},
    "limit": {"layers": "**", "kind": "parameter_grad", "action": "clip", "norm": 0.1},
}  # fmt: skip
# The norm of an activation is that of the samples of a process.
OF_BATCHES = {name: hook for name, hook in HOOKS.items() if name != "tame"}
CHANGES: dict[str, Any] = {
    "units": {"layers": "**.up", "kind": "forward", "action": "modify", "fn": "zero", "units": [3, 12]},
    "heads": {"layers": "**.q", "kind": "forward", "action": "scale", "factor": 0.5, "heads": {"of": HEADS, "take": [0, 3]}},
    "noise": {"layers": "**.k", "kind": "forward", "action": "modify", "fn": "noise", "std": 0.1},
    "norm": {"layers": ["**.v", "**.down"], "kind": "forward", "action": "clip", "norm": 1.0},
    "grads": {"layers": ["**.up", "**.down"], "kind": "full_backward_pre", "action": "clip", "norm": 0.05},
    "gated": {"layers": "**.up", "kind": "full_backward_pre", "action": "modify", "fn": of_large_values},
    "weights": {"layers": "**.up", "kind": "step_post", "role": "param", "action": "modify", "fn": "noise", "std": 0.01},
    "ratio": {"layers": "**.down", "kind": "parameter_grad", "action": "clip", "ratio": 0.01},
}  # fmt: skip


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # The gradient of the bias of keys is zero, except for rounding.
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=name != "k") for name in "qkvo")

    def forward(self, x: Tensor) -> Tensor:
        heads = (part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v))
        together: Tensor = self.o(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return together


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm, self.up, self.act, self.down = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, HIDDEN),
            nn.ReLU(),
            nn.Linear(HIDDEN, WIDTH),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.before(x))
        y: Tensor = x + self.down(self.act(self.up(self.norm(x))))
        return y


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(CLASSES, WIDTH), nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(self.embed(ids)))
        return logits


def create() -> Transformer:
    """Create the model with some dead units in both halves of a layer that is sharded."""
    torch.manual_seed(0)
    model = Transformer()
    with torch.no_grad():
        for dead in (slice(0, 2), slice(11, 14)):
            model.blocks[0].up.weight[dead], model.blocks[0].up.bias[dead] = 0.0, -1.0  # type: ignore[index,operator,union-attr]
    return model


def batch(step: int) -> Tensor:
    """Return the tokens of all processes at a step, int64 [BATCH, TOKENS]."""
    return torch.randint(CLASSES, (BATCH, TOKENS), generator=torch.Generator().manual_seed(step))


def train(
    model: nn.Module,
    hooks: Mapping[str, Any],
    *,
    part: Callable[[Tensor], Tensor] = lambda batch: batch,
    shards: int = 1,
    add: Callable[[Iterable[nn.Parameter]], None] = lambda parameters: None,
    **options: Any,
) -> tuple[list[float], Any]:
    """Train for some steps. Return the losses and the full parameters, and the probe.

    Args:
        part: Returns this process's samples of a batch.
        shards: The number of batch shards. The loss is divided by it, and gradients are added.
        add: Adds the gradients of batch shards.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    losses = []
    with instrument.attach(model, hooks, optimizer=optimizer, **options) as probe:
        for step in range(STEPS):
            ids = part(batch(step))
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids).flatten(0, 1), (7 * ids.flatten() + 1) % CLASSES)
            (loss / shards).backward()
            add(model.parameters())
            optimizer.step()
            probe.end_step(loss=loss)
            losses.append(loss.item())
    parameters = [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]
    return losses + torch.cat([each.detach().flatten() for each in parameters]).tolist(), probe


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    """Shard attention and the layers between over a mesh with one dimension."""
    columns = dict.fromkeys(["attention.q", "attention.k", "attention.v", "up"], ColwiseParallel())
    rows = dict.fromkeys(["attention.o", "down"], RowwiseParallel())
    plan = {f"blocks.*.{name}": style for name, style in (columns | rows).items()}
    return parallelize_module(create(), mesh, plan)


DECLARED = {"**.act": {"output": {"tp": "shard(-1)"}}}


def sequence_parallel(mesh: DeviceMesh) -> nn.Module:
    """Shard the tokens outside of attention, and give local tensors to the modules."""
    tokens = {"output_layouts": Shard(1), "use_local_output": True}
    plan: dict[str, Any] = {
        "embed": PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Shard(1)),
        "blocks.*.before": SequenceParallel(use_local_output=True),
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=Shard(1), desired_input_layouts=Replicate(), use_local_output=True
        ),
        "blocks.*.attention.o": RowwiseParallel(**tokens),
        "blocks.*.norm": SequenceParallel(use_local_output=True),
        "blocks.*.up": ColwiseParallel(input_layouts=Shard(1)),
        "blocks.*.down": RowwiseParallel(**tokens),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    plan |= {f"blocks.*.attention.{name}": ColwiseParallel() for name in "qkv"}
    return parallelize_module(create(), mesh, plan)


class Summed(torch.autograd.Function):
    """Adds the tensors of all processes, as at the end of a block of Megatron-LM."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


class Copied(torch.autograd.Function):
    """Adds the gradients of all processes, as at the start of a block of Megatron-LM."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


class MegatronBlock(nn.Module):
    """A block whose process has some hidden units, without DTensors."""

    def __init__(self, full: nn.Sequential) -> None:
        super().__init__()
        rank, size = dist.get_rank(), dist.get_world_size()
        self.up, self.act, self.down = nn.Linear(WIDTH, HIDDEN // size), nn.ReLU(), nn.Linear(HIDDEN // size, WIDTH)
        with torch.no_grad():
            self.up.weight.copy_(full[0].weight.chunk(size)[rank])
            self.up.bias.copy_(full[0].bias.chunk(size)[rank])
            self.down.weight.copy_(full[2].weight.chunk(size, dim=1)[rank])
            self.down.bias.copy_(full[2].bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.act(self.up(Copied.apply(x)))
        summed: Tensor = Summed.apply(F.linear(hidden, self.down.weight)) + self.down.bias
        return summed


MEGATRON = {
    "**": {"input": {"tp": "replicate"}, "output": {"tp": "replicate"}},
    "up": {"output": {"tp": "shard(-1)"}, "weight": {"tp": "shard(0)"}, "bias": {"tp": "shard(0)"}},
    "act": {"input": {"tp": "shard(-1)"}, "output": {"tp": "shard(-1)"}},
    "down": {"input": {"tp": "shard(-1)"}, "weight": {"tp": "shard(1)"}},
}
MEGATRON_HOOKS = {
    "seen": {**RECORD, "layers": ["up", "act", "."], "kind": "forward", "stats": ["default", "dead_fraction"]},
    "weights": {**RECORD, "kind": "step_post", "role": "param", "stats": ["default", "dead_fraction"]},
    "back": {**RECORD, "layers": ["act", "."], "kind": "full_backward"},
    "tame": {"layers": "act", "kind": "forward", "action": "clip", "norm": 3.0},
    "units": {"layers": "up", "kind": "forward", "action": "modify", "fn": "zero", "units": [1, 14]},
}


def full_block() -> nn.Sequential:
    torch.manual_seed(1)
    names = ("up", "act", "down")
    layers = (nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH))
    model = nn.Sequential()
    for name, layer in zip(names, layers, strict=True):
        model.add_module(name, layer)
    return model


def train_block(model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with instrument.attach(model, MEGATRON_HOOKS, optimizer=optimizer, **options) as probe:
        for step in range(STEPS):
            optimizer.zero_grad()
            x = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step)).requires_grad_()
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            probe.end_step(loss=loss)
    return probe


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return 2 * gradients[0]


class Hidden(nn.Module):
    """A model with a shard that the graph of a plain tensor does not show."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)
        self.scale, self.by = nn.Parameter(torch.ones(())), by
        for layer in (self.up, self.down):
            layer.requires_grad_(by != "frozen")

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "checkpoint":
            hidden = checkpoint(self.up, x, use_reentrant=True)
        else:
            hidden = Doubled.apply(self.up(x)) if self.by == "function" else self.scale * self.up(x)
        y: Tensor = self.down(self.act(hidden))
        return y


def hidden(mesh: DeviceMesh, by: str, declared: str | None = None) -> str:
    """Return the placement and the scope of a shard, or the error of the hook."""
    model = parallelize_module(Hidden(by), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    placement = None if declared is None else {"act": {"output": {"tp": declared}}}
    try:
        with instrument.attach(
            model,
            {"seen": {**RECORD, "layers": "act", "kind": "forward"}},
            optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
            placement=placement,
        ) as probe:
            model(torch.ones(BATCH, WIDTH).requires_grad_(by == "checkpoint"))
            probe.end_step()
    except instrument.HookError as error:
        return str(error)
    return next(iter(places(probe).values()))


def message(model: nn.Module, hooks: Mapping[str, Any], **options: Any) -> str:
    """Return the error of `attach`."""
    try:
        with instrument.attach(model, hooks, **options):
            return ""
    except instrument.ConfigError as error:
        return str(error)


def places(probe: Any) -> dict[str, str]:
    """Return the placement and the scope of each tensor of the first step."""
    rows = probe.stats.query("step == 0").drop_duplicates(["hook", "layer", "path"])
    return {
        f"{row.hook} {row.layer} {row.path}": f"{row.mesh} {row.placement} {row.scope}" for row in rows.itertuples()
    }


def causes(probe: Any) -> list[Any]:
    return [[row["hook"], row["layer"], row["cause"]] for row in probe.coverage() if row["fired"] < row["expected"]]


def evaluated(mesh: DeviceMesh) -> tuple[dict[str, str], list[str]]:
    """Evaluate without gradients. Return the placement of each output, and the messages about placements."""
    model = tensor_parallel(mesh)
    with instrument.attach(model, {"seen": {**RECORD, "kind": "forward", "phase": "eval"}}, reduce="global") as probe:
        with probe.evaluating(), torch.no_grad():
            model(batch(0))
        probe.end_step()
    return places(probe) if dist.get_rank() == 0 else {}, [*probe.events.query("rule == 'placement'")["message"]]


COUNTED: dict[str, dict[str, Any]] = {
    "loss": {"loss": {"kind": "loss", "action": "record"}},
    "parameters": {"grads": {**RECORD, "kind": "parameter_grad"}, "weights": HOOKS["updates"]},
    "outputs": {"seen": {**RECORD, "kind": "forward"}},
    "units": {"seen": {**RECORD, "kind": "forward", "stats": ["default", "dead_fraction"]}},
    "distributions": {"seen": {**RECORD, "kind": "forward", "histogram": 8}},
}


def collectives(model: nn.Module, steps: int = 2) -> dict[str, list[int]]:
    """Return by how many collective operations each scheduled step exceeds one without, as the profiler counts them."""

    def train_step(step: int, optimizer: torch.optim.Optimizer) -> Tensor:
        loss = F.cross_entropy(model(batch(step)).flatten(0, 1), batch(step).flatten())
        loss.backward()
        optimizer.step()
        return loss

    for step in range(2):  # In its second step, DistributedDataParallel changes its buckets.
        train_step(step, torch.optim.SGD(model.parameters(), lr=0.1, foreach=False))
    found = {}
    for name, hooks in COUNTED.items():
        counts = []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
        scheduled = {hook: {**spec, "every": 2} for hook, spec in hooks.items()}
        with instrument.attach(model, scheduled, optimizer=optimizer, reduce="global") as probe:
            for step in range(steps):
                with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
                    probe.end_step(loss=train_step(step, optimizer))
                # The profiler makes a table of the events that takes longer than the step.
                events = profiler.profiler.kineto_results.events()  # type: ignore[union-attr]
                counts.append(sum(event.name().startswith("c10d::") for event in events))
        found[name] = [one - other for one, other in zip(counts[::2], counts[1::2], strict=True)]
    return found


def waits(mesh: DeviceMesh) -> list[bool]:
    """Return, with and without a hook on its values, whether the output of a row-wise layer is complete before it is used."""
    found = []
    for kind in ("forward", "full_backward_pre"):
        model = tensor_parallel(mesh)
        completed: list[bool] = []
        with instrument.attach(model, {"seen": {**RECORD, "layers": "**.down", "kind": kind}}):

            def note(_: nn.Module, inputs: Any, output: Tensor, completed: list[bool] = completed) -> None:
                assert isinstance(output, AsyncCollectiveTensor)
                completed.append(output.completed)

            handle = model.blocks[0].down.register_forward_hook(note)  # type: ignore[index,operator,union-attr]
            model(batch(0))
            handle.remove()
        found += completed
    return found


def on_two(folder: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    observed = {name: hook for name, hook in HOOKS.items() if hook["action"] == "record"}
    bare, _ = train(tensor_parallel(mesh), {})
    recorded, probe = train(tensor_parallel(mesh), observed)
    merged, _ = train(tensor_parallel(mesh), observed, reduce="global")
    found: dict[str, Any] = {
        "is_identical": [bare == recorded, bare == merged],
        "places": places(probe),
        "missed": causes(probe),
    }
    found["tp"], probe = train(tensor_parallel(mesh), HOOKS, placement=DECLARED, reduce="global", out=folder / "tp")
    found["differences"] = [*probe.ranks.differences.values()]
    found["changed"], _ = train(
        tensor_parallel(mesh), CHANGES, placement=DECLARED, reduce="global", out=folder / "changed", seed=3
    )
    found["sp"], _ = train(sequence_parallel(mesh), HOOKS, placement=DECLARED, reduce="global", out=folder / "sp")
    _, probe = train(sequence_parallel(mesh), observed)
    found["sp places"] = places(probe)
    train_block(MegatronBlock(full_block()), mesh=mesh, placement=MEGATRON, reduce="global", out=folder / "megatron")
    (found["eval"], found["eval events"]), found["waits"] = evaluated(mesh), waits(mesh)
    sharded = create()
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    replicated = nn.parallel.DistributedDataParallel(create())
    found["collectives"] = {
        "ddp": collectives(replicated),
        "fsdp2": collectives(sharded),
        "tp": collectives(tensor_parallel(mesh), steps=4),
    }
    hook, model = (
        {"h": {"layers": "blocks.*", "kind": "forward", "action": "scale", "factor": 0.5}},
        tensor_parallel(mesh),
    )
    block = {"blocks.*": {"output": {"tp": "replicate"}}}
    found["hidden"] = {by: hidden(mesh, by) for by in ("", "frozen", "checkpoint", "function")}
    found["dimensions"] = [hidden(mesh, "", declared) for declared in ("shard(2)", "shard(-3)")]
    other = init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "other"))["other"]
    found["refused"] = {
        "budget": message(
            model, {"h": {**RECORD, "layers": "blocks.*", "kind": "forward", "units": [1]}}, budget={"time": "5%"}
        ),
        "type": message(model, {}, placement={"**": {"output": "replicate"}}),
        "size": message(create(), {}, mesh=other, reduce="global"),
        "unknown": message(model, hook),
        "declared": message(model, hook, placement=block),
        "dimension": message(model, {}, placement={"**": {"output": {"dp": "replicate"}}}),
        "text": message(model, {}, placement={"**": {"output": {"tp": "shard"}}}),
        "tensor": message(model, {}, placement={"head": {"outptu": {"tp": "replicate"}}}),
        "layer": message(model, {}, placement={"hed": {"output": {"tp": "replicate"}}}),
        "mesh": message(create(), {}, placement=block),
        "name": message(model, {}, mesh="tp"),
    }
    return found


def on_four(folder: Path) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    found: dict[str, Any] = {}

    def part(whole: Tensor) -> Tensor:
        return whole.chunk(2)[mesh.get_local_rank("dp")]

    def add(parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.grad is not None:
                gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
                dist.all_reduce(gradient, group=mesh.get_group("dp"))

    def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        for module in (*model.blocks, model):  # type: ignore[union-attr,misc]
            sharded: Any = fully_shard(module, mesh=mesh)
            sharded.set_gradient_divide_factor(1.0)
            sharded.set_force_sum_reduction_for_comms(True)
        return model

    found["dp_tp"], _ = train(
        tensor_parallel(mesh["tp"]), OF_BATCHES, part=part, shards=2, add=add, reduce="global", out=folder / "dp_tp"
    )
    sharded = shard(tensor_parallel(mesh["tp"]), mesh["dp"])
    found["fsdp_tp"], _ = train(sharded, OF_BATCHES, part=part, shards=2, reduce="global", out=folder / "fsdp_tp")
    hybrid = shard(create(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards")))
    options: dict[str, Any] = {"part": lambda ids: ids.chunk(4)[dist.get_rank()], "shards": 4}
    found["hybrid"], _ = train(hybrid, OF_BATCHES, **options, reduce="global", out=folder / "hybrid")
    return found


if __name__ == "__main__":
    print_results(lambda: {"tp": on_two, "dp_tp": on_four}[sys.argv[2]](Path(sys.argv[1])))
