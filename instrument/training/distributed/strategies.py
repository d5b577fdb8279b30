"""Training strategies: a single process, `DistributedDataParallel`, FSDP2, and these two on a mesh with tensor parallel layers.

Every process makes the same steps, each on its shard of the batch. The processes of a tensor parallel group have the
same shard. The result equals that of one process on the full batch: each loss is weighted by its number of samples, so
shards may differ in size, and gradients are summed, not averaged. A gradient inside the model therefore has the same
scale as in a run with one process.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...config.base import ObservationSpec
from ...config.experiment import BudgetConfig, RunConfig
from ...config.hook_specs import HookSpec, RecordSpec
from ...config.parallel import ParallelConfig
from ...errors import ConfigError, InstrumentError, Problem
from ...hooks.distributed_scope import Parallel
from ...plan.hook_plan import HookPlan
from ...plan.modules import Layers
from ...probe.collectives import Ranks
from ...runtime.own_operations import own_collectives
from ...tasks.base import WeightedMean
from ...tasks.model_output import Forward
from ...values.dtensor import is_sharded, local_shard
from ..environment import choose_device
from ..loader import FULL_BATCH, Batches, BatchShard
from .torchrun import check_processes

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .pipeline import Pipeline
    from .process_group import Number, Processes

EXPERTS = "train.parallel.experts"


class Strategy:
    """Training in a single process; base class of the distributed strategies."""

    needs_all_gradients = False  # whether the backward pass waits for the gradient of every trainable parameter
    saves_state = True  # whether a checkpoint needs the parameters and the optimizer state of this process
    batch_shard = FULL_BATCH
    ranks: Ranks | None = None  # description of the ranks for the probe
    processes: Processes | None = None
    mesh: DeviceMesh | None = None  # None if no parameter is sharded
    pipeline: Pipeline | None = None  # the stage of this process, after `shard`

    def __init__(self, parallel: ParallelConfig | None = None) -> None:
        self.parallel = parallel  # also in a single process, which checks it for a plan (`plan=true`)

    @classmethod
    def config_problems(cls, config: RunConfig) -> list[Problem]:
        """Return the unsupported settings of a configuration. A single process plans a run of several ones."""
        return [] if config.train.parallel is None else _strategy_type(config.train.parallel).config_problems(config)

    def shard(self, model: nn.Module, loss: Callable[[], Tensor | None]) -> bool:  # noqa: ARG002
        """Shard the parameters of a model in place, before the optimizer is created. Return whether they were replaced.

        `loss` computes the loss of the first batch of this process, to compare the models before and after.
        """
        if self.parallel is not None and self.parallel.mesh:
            from .pipeline import starts_of
            from .tensor_parallel import styles_of

            layers, sizes, pipeline = Layers.of(model), self.parallel.sizes, self.parallel.pipeline
            styles_of(layers, sizes.get("tp", 1), self.parallel.plan)
            styles_of(layers, sizes.get("dp", 1), self.parallel.experts, EXPERTS)
            starts_of(layers, () if pipeline is None else pipeline.split)
        return False

    def check_model_call(self, *, calls_model: bool) -> None:
        """Raise a ConfigError if the strategy needs calls of the full model, and the task calls only submodules of it."""

    def own_sites(self, plan: HookPlan) -> HookPlan:
        return plan if self.pipeline is None else self.pipeline.own_sites(plan)

    def wrap(self, forward: Forward, *, has_unused: bool) -> nn.Module:  # noqa: ARG002
        """Return the module that the training loop calls. `has_unused`: parameters may receive no gradient in this process."""
        return forward

    def seed_ranks(self, seed: int) -> None:
        """Give each process a different random state, for example for dropout."""

    @contextmanager
    def micro_step(self, trained: nn.Module, *, last: bool) -> Iterator[None]:  # noqa: ARG002
        """Context manager for one forward and backward pass. The last pass of a step sums gradients of all ranks."""
        yield

    def means(self, means: Sequence[WeightedMean]) -> list[WeightedMean]:
        """Combine the means of this process into means over all processes, in the same order, with the sums of the weights."""
        return list(means)

    def check_batches(self, batches: Batches) -> None:
        """Raise a ConfigError if the micro-batches of a pipeline would differ in size or number."""
        if self.parallel is None or self.parallel.pipeline is None:
            return
        size = batches.batch_size * batches.accumulate
        if batches.length % size:
            message = f"the {batches.length} samples of an epoch are not a multiple of the {size} of a step, as a pipeline requires"
            fix = "change data.slice.stop, train.batch_size or train.accumulate"
            raise ConfigError(Problem("data.slice", message, batches.length, f"a multiple of {size}", fix=fix))

    def total(self, number: Number) -> Number:
        return number

    def broadcast_buffers(self, model: nn.Module) -> None:
        """Copy the buffers of rank 0, such as the running mean of BatchNorm, to all processes."""


class DataParallel(Strategy):
    """Data parallel training: each process has the full model (`torch.nn.parallel.DistributedDataParallel`).

    On a mesh, the processes of the dimension `tp` share one copy of the model. `DistributedDataParallel` would replace its DTensors
    by their local tensors; so the gradients are summed over `dp` here, after the last backward pass of a step.
    """

    name: Parallel = "ddp"
    processes: Processes
    parallel: ParallelConfig

    def __init__(self, processes: Processes, parallel: ParallelConfig, device: torch.device, *, reduces: bool) -> None:
        self.processes = processes
        self.parallel = parallel
        self._data_group: Any = None  # of all processes
        data_ranks = [*range(processes.size)]
        if parallel.mesh or parallel.data == "fsdp2":
            from torch.distributed.device_mesh import init_device_mesh

            sizes = parallel.mesh or {"dp": processes.size}
            # Each use of two dimensions of a mesh would be reported, in every process.
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
            self.mesh = init_device_mesh(device.type, (*sizes.values(),), mesh_dim_names=(*sizes,))
            data_ranks = [processes.rank]
            if "dp" in sizes:
                self._data_group = self.mesh.get_group("dp")
                data_ranks = dist.get_process_group_ranks(self._data_group)
        self.needs_all_gradients = self.mesh is None
        self.saves_state = self.mesh is not None or processes.is_rank_zero
        self.data_ranks = data_ranks
        self.batch_shard = BatchShard(data_ranks.index(processes.rank), len(data_ranks))
        self._all_reduced = False
        # Tensors are placed over the mesh of the stage of a pipeline if layers are parallelized.
        names = tuple(name for name in parallel.sizes if name != "pp")
        is_divided = parallel.plan or parallel.experts or parallel.placement
        self.ranks = Ranks(
            self.name,
            reduces=reduces,
            merged_metrics=True,
            sums_gradients=True,
            control=processes.control,
            mesh=self.mesh[names] if self.mesh is not None and is_divided else None,
            placement=parallel.placement,
            data=("dp",),
            batches=len(data_ranks),
        )

    @classmethod
    def config_problems(cls, config: RunConfig) -> list[Problem]:
        problems = reduce_problems(config.budget, config.hooks) if config.reduce == "global" else []
        parallel = config.train.parallel
        if cls.name == "ddp" and parallel is not None and (parallel.plan or parallel.experts or parallel.pipeline):
            problems += penalty_problems(config.hooks)
        return problems + pipeline_problems(config)

    def shard(self, model: nn.Module, loss: Callable[[], Tensor | None]) -> bool:
        if self.mesh is None:
            return False
        for name, key, styles in (("tp", "plan", self.parallel.plan), ("dp", "experts", self.parallel.experts)):
            if styles:
                from .tensor_parallel import parallelize

                self.processes.exchange(None)  # A process that failed would not send its parameters.
                parallelize(model, self.mesh[name], styles, loss, where=f"train.parallel.{key}")
        if self.parallel.pipeline is not None:
            from .pipeline import Pipeline

            self.pipeline = Pipeline(model, self.parallel.pipeline, self.mesh.get_group("pp"), loss)
        return True

    def wrap(self, forward: Forward, *, has_unused: bool) -> nn.Module:
        if self.mesh is not None:
            return forward
        find_unused = any(self.processes.exchange(has_unused))
        wrapped = DistributedDataParallel(forward, find_unused_parameters=find_unused)
        wrapped.register_comm_hook(None, lambda _, bucket: self._reduce_bucket(bucket))
        return wrapped

    def _reduce_bucket(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Sum a bucket of gradients over all processes. By default, `DistributedDataParallel` averages them."""
        self._all_reduced |= bucket.is_last()  # Buckets arrive in order.
        arrived = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return arrived.then(lambda future: future.value()[0])

    @contextmanager
    def micro_step(self, trained: nn.Module, *, last: bool) -> Iterator[None]:
        self._all_reduced = False
        with trained.no_sync() if isinstance(trained, DistributedDataParallel) and not last else nullcontext():
            yield
        if last and self.mesh is not None:
            self._sum_gradients(trained)
        elif last and not self._all_reduced:  # PyTorch would raise only in the next step.
            problem = (
                "the loss of this step does not depend on all trainable parameters, but that of the first batch did"
            )
            raise InstrumentError(f"{problem}; set train.find_unused_parameters=true")

    def _sum_gradients(self, trained: nn.Module) -> None:
        """Sum the gradients over `dp`, except those of experts, which are sums already.

        The gradient of a parameter without one is zero if another process has one.
        """
        if self.batch_shard.size == 1:
            return
        trainable = [
            parameter
            for parameter in trained.parameters()
            if parameter.requires_grad
            and not (is_sharded(parameter) and "dp" in (parameter.device_mesh.mesh_dim_names or ()))
        ]
        given = torch.tensor([parameter.grad is not None for parameter in trainable], dtype=torch.uint8)
        dist.all_reduce(given, dist.ReduceOp.MAX, group=self._data_group)
        sums = []
        for parameter, is_given in zip(trainable, given.tolist(), strict=True):
            if is_given:
                parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                sums.append(dist.all_reduce(local_shard(parameter.grad), group=self._data_group, async_op=True))
        for each in sums:
            each.wait()

    def seed_ranks(self, seed: int) -> None:
        if self.batch_shard.rank:  # the first shard keeps the random state of a single-process run
            torch.manual_seed(seed + self.batch_shard.rank)

    @own_collectives()
    def means(self, means: Sequence[WeightedMean]) -> list[WeightedMean]:
        """Compute means over all processes: float64 on the device of the values. A mean without a value has none in any process."""
        present = [(mean.value.detach().double(), mean.weight) for mean in means if mean.value is not None]
        if not present:
            return list(means)
        weights = [torch.as_tensor(weight, dtype=value.dtype, device=value.device) for value, weight in present]
        sums = torch.stack([*(value * weight for (value, _), weight in zip(present, weights, strict=True)), *weights])
        if self.batch_shard.size > 1:
            dist.all_reduce(sums, group=self._data_group)
        if self.pipeline is not None:
            sums = self.pipeline.from_last_stage(sums)
        totals = sums[len(present) :]
        reduced = iter(zip(sums[: len(present)] / totals.where(totals != 0, 1), totals, strict=True))
        return [mean if mean.value is None else WeightedMean(*next(reduced)) for mean in means]

    def total(self, number: Number) -> Number:
        every = self.processes.exchange(number)
        return sum(every[rank] for rank in self.data_ranks)  # type: ignore[no-any-return]

    def broadcast_buffers(self, model: nn.Module) -> None:
        for buffer in model.buffers() if self.batch_shard.size > 1 else ():
            dist.broadcast(local_shard(buffer), self.data_ranks[0], group=self._data_group)


class FullySharded(DataParallel):
    """Fully sharded training with FSDP2: each process has a shard of every parameter.

    The parameters are sharded with `torch.distributed.fsdp.fully_shard` and gathered one block at a time. The blocks
    are the elements of each outermost `ModuleList` or `Sequential`. The root module gathers all remaining parameters.
    """

    name: Parallel = "fsdp2"

    @classmethod
    def config_problems(cls, config: RunConfig) -> list[Problem]:
        problems = super().config_problems(config)
        if config.train.precision == "fp16":
            message = "the gradient scaler of fp16 does not support sharded parameters"
            problems.append(Problem("train.precision", message, "fp16", "fp32, bf16"))
        return problems + shard_problems(config.hooks, by_fsdp2=True)

    def shard(self, model: nn.Module, loss: Callable[[], Tensor | None]) -> bool:
        from torch.distributed.fsdp import FSDPModule, fully_shard

        if next(model.parameters(), None) is None:
            message = "the model has no parameters to shard"
            raise ConfigError(Problem("train.parallel", message, given=self.name, allowed=DataParallel.name))
        super().shard(model, loss)
        assert self.mesh is not None
        mesh = self.mesh["dp"]
        for block in _blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return True

    def check_model_call(self, *, calls_model: bool) -> None:
        if not calls_model:
            message = (
                "the task calls submodules of the model, but fsdp2 gathers shards only when the full model is called"
            )
            raise ConfigError(Problem("train.parallel", message, given=self.name, allowed=DataParallel.name))

    # FSDP2 reduces the gradients of the shards itself, after each pass.
    wrap = Strategy.wrap
    micro_step = Strategy.micro_step


def choose_strategy(config: RunConfig, processes: Processes | None) -> Strategy:
    """Create the strategy that `train.parallel` selects. Raise a ConfigError unless it fits the number of processes."""
    check_processes(config, processes)
    if processes is None:
        return Strategy()
    parallel = config.train.parallel
    assert parallel is not None, "checked for several processes"
    device = choose_device(config.device)
    return _strategy_type(parallel)(processes, parallel, device, reduces=config.reduce == "global")


def _strategy_type(parallel: ParallelConfig) -> type[DataParallel]:
    return FullySharded if parallel.data == FullySharded.name else DataParallel


def reduce_problems(budget: BudgetConfig | None, hooks: Mapping[str, HookSpec]) -> list[Problem]:
    """Report what cannot be combined with `reduce=global`: a recording budget, conditions of record hooks, rows for each
    sample, custom statistics, and fingerprints.
    """
    problems = []
    if budget is not None and (budget.time is not None or budget.bytes is not None):
        message = "each rank would pause hooks at different steps, but reduce=global requires the rows of all ranks"
        problems.append(Problem("budget", message, fix="set reduce=none"))
    for name, spec in hooks.items():
        if not isinstance(spec, RecordSpec):
            continue
        if spec.condition is not None:
            message = "each rank decides about its own tensors, but reduce=global requires the rows of all ranks"
            problems.append(Problem(f"hooks.{name}.when", message, str(spec.condition), fix="set reduce=none"))
        if spec.split_dim == 0:
            message = "dimension 0 has other samples in each process, but reduce=global merges rows of the same index"
            problems.append(Problem(f"hooks.{name}.split_dim", message, 0, fix="set reduce=none"))
        unmerged = [*(own.target for own in spec.custom_statistics), *({"fingerprint"} & {*spec.stats})]
        if unmerged:
            message = "the values of several processes cannot be merged into one row, as reduce=global requires"
            problems.append(Problem(f"hooks.{name}.stats", message, unmerged[0], fix="set reduce=none"))
    return problems


def pipeline_problems(config: RunConfig) -> list[Problem]:
    train, parallel = config.train, config.train.parallel
    if parallel is None or parallel.pipeline is None:
        return []
    cases = {
        "reduce": ("each stage of a pipeline has its own rows", config.reduce, "none"),
        "mode": ("a pipeline only trains", config.mode, "train"),
        "train.precision": ("the stages of a pipeline send float32", train.precision, "fp32"),
    }
    problems = [
        Problem(where, message, given, only) for where, (message, given, only) in cases.items() if given != only
    ]
    if train.compile is not None:
        problems.append(Problem("train.compile", "the stages of a pipeline are not compiled", True, "false"))
    for name, spec in config.hooks.items():
        if spec.schedule.phase == "probe":
            problems.append(Problem(f"hooks.{name}.phase", "a pipeline has no probe batch", "probe", "train, eval"))
    stages = parallel.sizes["pp"]
    if parallel.pipeline.schedule == "1f1b" and train.accumulate < stages:
        message = "schedule 1f1b requires a micro-batch for each stage"
        problems.append(Problem("train.accumulate", message, train.accumulate, f"{stages} or more"))
    return problems


def shard_problems(hooks: Mapping[str, HookSpec], *, by_fsdp2: bool) -> list[Problem]:
    """Report hooks that never fire, have no effect, or select other elements, on sharded parameters."""
    problems = penalty_problems(hooks)
    for name, spec in hooks.items():
        if by_fsdp2 and spec.kind == "parameter_grad_micro":
            message = "Tensor.register_hook never fires on parameters sharded by fsdp2"
            allowed = ("post_accumulate_grad", "parameter_grad")
            problems.append(Problem(f"hooks.{name}.kind", message, spec.kind, allowed))
        if isinstance(spec, ObservationSpec) and spec.definition.family != "module":
            message = "a process has a shard of this tensor, whose indices differ from those of the full tensor"
            problems += [
                Problem(f"hooks.{name}.{field}", message, getattr(spec, field), fix="record the complete tensor")
                for field in spec.selection
                if field != "slice"
            ]
    return problems


def penalty_problems(hooks: Mapping[str, HookSpec]) -> list[Problem]:
    """Report penalties on the loss. A process adds only those of its own parameters, and FSDP2 ignores their gradients."""
    message = "a penalty on the loss does not support parameters that the processes divide"
    return [
        Problem(f"hooks.{name}.kind", message, spec.kind, "parameter_grad")
        for name, spec in hooks.items()
        if spec.uses_parameters and spec.kind == "loss"
    ]


def _blocks(model: nn.Module) -> list[nn.Module]:
    blocks: list[nn.Module] = []

    def search(module: nn.Module) -> None:
        for child in module.children():
            is_block = (
                isinstance(module, nn.ModuleList | nn.Sequential) and type(child).forward is not nn.Module.forward
            )
            if is_block and any(True for _ in child.parameters()):
                blocks.append(child)
            else:
                search(child)

    search(model)
    inside = {id(module) for block in blocks for module in block.modules()}
    outside = [module for module in model.modules() if id(module) not in inside]
    owners = Counter(id(parameter) for block in blocks for parameter in block.parameters())
    owners.update(id(parameter) for module in outside for parameter in module.parameters(recurse=False))
    return [block for block in dict.fromkeys(blocks) if all(owners[id(p)] == 1 for p in block.parameters())]


def has_unused_parameters(model: nn.Module, loss: Tensor) -> bool:
    """Return whether a trainable parameter receives no gradient from a loss, whose autograd graph is freed.

    The hooks of the run need not be attached: an intervention keeps the replaced tensor in the graph, or it is refused.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    except RuntimeError:
        # Reentrant checkpointing supports only `backward`. Any other error is raised again in the first training step.
        return False
    return any(gradient is None for gradient in gradients)
