"""How a model trains in one process, or in several: what each of them gets of a batch, what is sent, and when.

Every process makes the same steps on its share of each batch, and what comes of them is what one process would get from the
whole batches: a loss is weighted by its samples, so that shares need not be of one size, and gradients are summed up. So a
gradient inside the model is on the scale that it has where one process trains.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...capture.ranks import Ranks
from ...errors import ConfigError, InstrumentError, Mistake
from ...kinds.scope import Parallel
from ...spec.config import RunConfig
from ..forward import Forward
from .refusals import budget_mistakes, shard_mistakes
from .shares import WHOLE, Share
from .torchrun import check_processes

if TYPE_CHECKING:
    from .processes import Processes


class Strategy:
    """One process: nothing is shared, and nothing sent.

    Attributes:
        share: What a process gets of each batch.
        ranks: The processes, for the probe; None for a single one.
        processes: The processes of this run; None for a single one.
        waits_for_all: Whether it waits for the gradients of all parameters that train.
    """

    waits_for_all = False
    share = WHOLE
    ranks: Ranks | None = None
    processes: Processes | None = None

    @property
    def keeps_state(self) -> bool:
        """Whether a checkpoint needs this process's parameters, and what the optimizer knows of them."""
        return True

    def refuse(self, config: RunConfig) -> None:
        """Stop at what cannot be done in this way.

        Raises:
            ConfigError: With all of it.
        """

    def shard(self, model: nn.Module) -> bool:  # noqa: ARG002
        """Give each process its shard of the parameters, before there is an optimizer; whether parameters were replaced."""
        return False

    def refuse_parts(self, *, called_whole: bool) -> None:
        """Stop where the task never calls the model as a whole, and that is needed.

        Raises:
            ConfigError: With what can be done.
        """

    def wrap(self, forward: Forward, *, idle: bool) -> nn.Module:  # noqa: ARG002
        """What training calls in its place.

        Args:
            forward: What is done with each batch.
            idle: Whether there may be parameters that get no gradient.
        """
        return forward

    def draw_apart(self, seed: int) -> None:
        """From here on each process draws random numbers of its own, such as dropout's."""

    @contextmanager
    def micro_step(self, trained: nn.Module, *, last: bool) -> Iterator[None]:  # noqa: ARG002
        """A forward and backward pass, of which the last one of a step brings the gradients of all processes together."""
        yield

    def mean(self, values: Sequence[Tensor | None], weight: int) -> list[Tensor | None]:  # noqa: ARG002
        """Means over the samples or terms of all processes, from those over this one's; None where there is none."""
        return list(values)

    def total(self, samples: int) -> int:
        """The sum over all processes."""
        return samples

    def share_buffers(self, model: nn.Module) -> None:
        """Give all processes the first one's buffers, such as BatchNorm's running mean."""


class DataParallel(Strategy):
    """Several processes, each with the whole model: `torch.nn.parallel.DistributedDataParallel`.

    Args:
        processes: The processes of this run.
        reduces: Whether there is one row for all of them.
    """

    name: Parallel = "ddp"
    waits_for_all = True
    processes: Processes

    def __init__(self, processes: Processes, *, reduces: bool) -> None:
        self.processes = processes
        self.share = Share(processes.rank, processes.size)
        self._brought_all = False
        self.ranks = Ranks(self.name, reduces=reduces, merged_metrics=True, control=processes.control)

    @property
    def keeps_state(self) -> bool:
        """All have the same: the first one's are enough."""
        return self.processes.leads

    def refuse(self, config: RunConfig) -> None:
        """Stop at what several processes cannot do yet."""
        mistakes = _refused(config)
        if mistakes:
            raise ConfigError(*mistakes)

    def wrap(self, forward: Forward, *, idle: bool) -> nn.Module:
        """The same, with gradients that are summed up over all processes while the last backward pass of a step runs."""
        finds = any(self.processes.exchange(idle))
        wrapped = DistributedDataParallel(forward, find_unused_parameters=finds)
        wrapped.register_comm_hook(None, lambda _, bucket: self._bring_together(bucket))
        return wrapped

    def _bring_together(self, bucket: Any) -> torch.futures.Future[Tensor]:
        self._brought_all |= bucket.is_last()  # they come in order
        return _sum(bucket)

    @contextmanager
    def micro_step(self, trained: nn.Module, *, last: bool) -> Iterator[None]:
        """All micro-steps but the last one of a step keep their gradients to themselves."""
        assert isinstance(trained, DistributedDataParallel)
        self._brought_all = False
        with nullcontext() if last else trained.no_sync():
            yield
        if last and not self._brought_all:  # PyTorch would say so in the next step, when this one is made
            problem = "the loss of this step does not depend on all parameters, and that of the first batch did"
            raise InstrumentError(f"{problem}: train.find_unused_parameters=true is for models like this")

    def draw_apart(self, seed: int) -> None:
        """The first process goes on as it would alone; the others are seeded anew."""
        if not self.processes.leads:
            torch.manual_seed(seed + self.processes.rank)

    def mean(self, values: Sequence[Tensor | None], weight: int) -> list[Tensor | None]:
        """Weighted by the samples or terms of each process; in float64, on the device of the values."""
        present = [value for value in values if value is not None]
        if not present:
            return list(values)
        numbers = [value.detach().to(torch.float64) * weight for value in present]
        sums = torch.stack([*numbers, torch.full_like(numbers[0], weight)])
        dist.all_reduce(sums)
        means = iter(sums[:-1] / sums[-1].clamp(min=1))
        return [None if value is None else next(means) for value in values]

    def total(self, samples: int) -> int:
        """The sum over all processes; waits for them."""
        return self.processes.sum(samples)

    def share_buffers(self, model: nn.Module) -> None:
        """A broadcast from the first process."""
        for buffer in model.buffers():
            dist.broadcast(buffer, 0)


class FullySharded(DataParallel):
    """Several processes, each with a shard of every parameter: `torch.distributed.fsdp.fully_shard` (FSDP2).

    The blocks of the model are gathered one after the other: the modules in each `ModuleList` and `Sequential` that is in no
    other one, and the model with what is left.
    """

    name: Parallel = "fsdp2"
    waits_for_all = False

    @property
    def keeps_state(self) -> bool:
        """Each has a shard."""
        return True

    def refuse(self, config: RunConfig) -> None:
        """Stop at what cannot be done with sharded parameters, and at hooks that would never fire."""
        mistakes = _refused(config)
        if config.train.precision == "fp16":
            mistakes.append(
                Mistake("train.precision", "fp16's gradient scaler does not know shards", "fp16", "fp32, bf16")
            )
        if config.train.compile:
            mistakes.append(Mistake("train.compile", "a sharded model is not compiled", True, "false, or ddp"))
        mistakes += shard_mistakes(config.hooks)
        if mistakes:
            raise ConfigError(*mistakes)

    def shard(self, model: nn.Module) -> bool:
        """Replace the parameters by this process's shards."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, fully_shard

        device = next(model.parameters()).device
        mesh = init_device_mesh(device.type, (self.processes.size,))
        for block in _blocks(model):
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        return True

    def refuse_parts(self, *, called_whole: bool) -> None:
        """Parameters are gathered where the model is called."""
        if not called_whole:
            problem = "this task calls parts of the model, and shards are gathered where the whole of it is called"
            raise ConfigError(Mistake("train.parallel", problem, written=self.name, allowed=DataParallel.name))

    def wrap(self, forward: Forward, *, idle: bool) -> nn.Module:  # noqa: ARG002
        """The same: shards bring their gradients together by themselves."""
        return forward

    @contextmanager
    def micro_step(self, trained: nn.Module, *, last: bool) -> Iterator[None]:  # noqa: ARG002
        """Gradients are brought together after every backward pass: no process keeps a whole one."""
        yield


def choose_strategy(config: RunConfig, processes: Processes | None) -> Strategy:
    """What `train.parallel` says, for the processes that there are.

    Raises:
        ConfigError: They do not go together.
    """
    check_processes(config, processes)
    if processes is None:
        return Strategy()
    made = FullySharded if config.train.parallel == FullySharded.name else DataParallel
    return made(processes, reduces=config.reduce == "global")


def _refused(config: RunConfig) -> list[Mistake]:
    return budget_mistakes(config.budget) if config.reduce == "global" else []


def _sum(bucket: Any) -> torch.futures.Future[Tensor]:
    """The sum of a bucket of gradients, where DistributedDataParallel has their mean."""
    arrived = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return arrived.then(lambda future: future.value()[0])


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The modules to be gathered one by one: those with parameters that no other block has too."""
    found: list[nn.Module] = []

    def look(module: nn.Module) -> None:
        for child in module.children():
            is_block = (
                isinstance(module, nn.ModuleList | nn.Sequential) and type(child).forward is not nn.Module.forward
            )
            if is_block and any(True for _ in child.parameters()):
                found.append(child)
            else:
                look(child)

    look(model)
    owners: dict[int, int] = {}
    for block in found:
        for parameter in {id(parameter) for parameter in block.parameters()}:
            owners[parameter] = owners.get(parameter, 0) + 1
    outside = _parameters_outside(model, found)
    unique = dict.fromkeys(found)
    return [block for block in unique if all(owners[id(p)] == 1 and id(p) not in outside for p in block.parameters())]


def _parameters_outside(model: nn.Module, blocks: Sequence[nn.Module]) -> set[int]:
    """Parameters that a module in none of the blocks has."""
    inside = {id(module) for block in blocks for module in block.modules()}
    others = [module for module in model.modules() if id(module) not in inside]
    return {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
